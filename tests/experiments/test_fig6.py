"""The statistics behind the verdicts of Figure 6, on scores that are made up."""

import numpy as np
import pytest

from zeromean.experiments.exploration import fig6


def ramps(ends, *, half_way, episodes=1050, noise=0.0):
    """Scores of one policy for each end: from 0, half of it at an episode, then the rest."""
    steps = np.arange(episodes) >= half_way
    rng = np.random.default_rng(0)
    return [(end * steps + noise * rng.normal(size=episodes)).tolist() for end in ends]


def test_a_better_and_slower_variance_policy():
    compared = fig6._compared(
        {
            "deterministic": ramps([90, 100, 110], half_way=100),
            "parameter_noise": ramps([95, 100, 105], half_way=300),
            "variance": ramps([190, 200, 210], half_way=500),
        }
    )
    assert compared["best"] == pytest.approx(200)
    assert compared["variance_ends_better"] == 1
    assert compared["variance_is_slower"] == 1
    low, high = compared["variance_minus"]["deterministic"].values()
    assert 80 < low < 100 < high < 120
    half_ways = [row["half_way"] for row in compared["methods"].values()]
    # Blocks of ten episodes, named by their middles.
    assert half_ways == [105, 305, 505]


def test_no_difference_is_none():
    same = [50.0, 100.0, 150.0, 90.0]
    scores = {m: ramps(same, half_way=100) for m in ("deterministic", "parameter_noise")}
    compared = fig6._compared({**scores, "variance": ramps(same, half_way=100)})
    low, high = compared["variance_minus"]["parameter_noise"].values()
    assert low < 0 < high
    assert compared["variance_ends_better"] == 0
    assert compared["variance_is_slower"] == 0


def test_a_policy_that_learns_nothing_is_slow_and_needs_both_rivals():
    scores = {
        "deterministic": ramps([100, 100], half_way=100),
        "variance": ramps([0, 0], half_way=5, noise=1.0),
    }
    compared = fig6._compared(scores)
    assert compared["methods"]["variance"]["half_way"] is None
    assert "variance_is_slower" not in compared
    compared = fig6._compared({**scores, "parameter_noise": ramps([100, 90], half_way=50)})
    assert compared["variance_is_slower"] == 1
    assert compared["variance_ends_better"] == 0


def test_bootstrap_intervals_cover_the_difference():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        interval = fig6._bootstrap(rng.normal(3, 1, 30), rng.normal(2, 1, 30), draws=1000)
        covered += interval["low"] <= 1 <= interval["high"]
    # 95%, less a little with 30 values; four standard errors.
    assert covered >= 200 * (0.94 - 4 * np.sqrt(0.94 * 0.06 / 200))
