"""A fresh seed against a record: what is compared, with which interval, and what is refused."""

import dataclasses
import json
import math
import sys
import types

import pytest
import torch

from zeromean.experiments import registry
from zeromean.experiments.runs import provenance, records, runner, verify
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    sizes: tuple[int, ...] = (3, 4)
    shift: float = 0.0
    seed: int = 0


def run(config, log):
    def draw():
        a, b = torch.randn(2, dtype=torch.float64).tolist()
        return {"a": a + config.shift, "b": 5 + b, "constant": 7, "seconds": 1e3 * abs(a)}

    return {**log.once("draw", draw), "nothing": None, "curve": [1.0, 2.0]}


@pytest.fixture
def module(monkeypatch):
    """Two normal numbers, a constant and a time."""
    fake = types.ModuleType("drawn")
    fake.__dict__.update(
        TITLE="Drawn",
        SOURCE="nowhere",
        NEEDS=(),
        COVERS=(),
        Config=Config,
        QUICK=Config(sizes=(1, 2)),
        SMOKE=Config(sizes=(1,)),
        CLAIMS=[Claim("a", 0.0, ours(), 3.0, label="a")],
        TIMINGS=("seconds",),
        run=run,
        figures=lambda found: [],
    )
    monkeypatch.setitem(sys.modules, "drawn", fake)
    monkeypatch.setitem(registry.REGISTRY, "drawn", registry.Entry("drawn", "drawn", ()))
    monkeypatch.setattr(provenance, "commit", lambda: "1" * 40)
    monkeypatch.setattr(provenance, "commit_exists", lambda name: True)
    return fake


@pytest.fixture
def results(module, tmp_path):
    """A record of four seeds, and quick runs of two."""
    place = runner.Place(runs=tmp_path / "runs", progress=False)
    runner.run_experiment("drawn", Config(), [0, 1, 2, 3], place=place)
    runner.run_experiment("drawn", module.QUICK, [0, 1], place=place)
    records.collect(place.runs, tmp_path / "results")
    return tmp_path / "results"


def fresh(reference, tmp_path, seed, **changes):
    place = runner.Place(runs=tmp_path / "fresh", progress=False)
    changed = dataclasses.replace(
        reference, config=dataclasses.replace(reference.config, **changes)
    )
    folder = verify.fresh_run(changed, seed, place)
    metrics = json.loads((folder / "done.json").read_text())["metrics"]
    return {each.metric: each for each in verify.compare(reference, metrics)}


def test_every_number_but_times_is_compared_with_the_next_seed(results, tmp_path):
    reference = verify.reference("drawn", results)
    assert reference.config == Config()
    assert reference.seed() == 1000
    compared = fresh(reference, tmp_path, reference.seed())
    assert compared.keys() == {"a", "b", "constant"}
    assert {each.verdict for each in compared.values()} == {verify.INSIDE}


def test_the_interval_is_that_of_the_next_value_and_corrected_for_their_number(results, tmp_path):
    reference = verify.reference("drawn", results)
    values = [run["metrics"]["a"] for run in reference.runs]
    found = fresh(reference, tmp_path, 1000)["a"]
    # Student's t for three degrees of freedom at 1 - 0.01 / 2 / 2, from its closed form.
    quantile = next(q / 1e4 for q in range(10**6) if t3_cdf(q / 1e4) >= 1 - 0.01 / 4)
    mean = sum(values) / 4
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / 3 * (1 + 1 / 4))
    assert found.interval == pytest.approx(
        (mean - quantile * spread, mean + quantile * spread), rel=1e-3
    )
    assert found.mean == pytest.approx(mean)


def t3_cdf(t):
    x = t / math.sqrt(3)
    return 0.5 + (x / (1 + x * x) + math.atan(x)) / math.pi


def test_a_number_that_moved_is_outside(results, tmp_path):
    compared = fresh(verify.reference("drawn", results), tmp_path, 1000, shift=1e3)
    assert compared["a"].verdict == verify.OUTSIDE
    assert compared["b"].verdict == verify.INSIDE


def test_a_number_that_is_missing_or_not_finite_is_outside(results):
    reference = verify.reference("drawn", results)
    compared = {each.metric: each for each in verify.compare(reference, {"a": None, "b": 5.0})}
    assert compared["a"].verdict == verify.OUTSIDE
    assert compared["constant"].verdict == verify.OUTSIDE
    assert compared["b"].verdict == verify.INSIDE


def test_a_constant_says_nothing_about_other_seeds(results):
    reference = verify.reference("drawn", results)
    metrics = {"a": 0.0, "b": 5.0, "constant": 8}
    compared = {each.metric: each for each in verify.compare(reference, metrics)}
    assert compared["constant"].verdict == verify.NO_SPREAD
    assert compared["constant"].interval is None


def test_a_seed_of_the_record_is_refused(results):
    reference = verify.reference("drawn", results)
    assert reference.seed(17) == 17
    with pytest.raises(ValueError, match="seed 3 is in the record of drawn; choose another, such"):
        reference.seed(3)


def test_no_record_too_few_seeds_and_stale_ones_are_named(results, module, tmp_path):
    with pytest.raises(ValueError, match=r"there is no record of drawn at full size in .*none"):
        verify.reference("drawn", tmp_path / "none")
    with pytest.raises(ValueError, match=r"has 2 seeds, and a prediction interval takes 3; `zero"):
        verify.reference("drawn", results, size="quick")
    module.VERSION = 2
    with pytest.raises(ValueError, match=r"is stale: it is of version 1 of the experiment, which"):
        verify.reference("drawn", results)


def test_own_quick_runs_are_a_record_too(module, tmp_path):
    place = runner.Place(runs=tmp_path / "own", progress=False)
    runner.run_experiment("drawn", module.QUICK, [0, 1, 2], place=place)
    reference = verify.reference("drawn", tmp_path / "none", size="quick", runs=place.runs)
    assert reference.config == module.QUICK
    assert len(reference.runs) == 3


def test_a_fresh_run_that_was_there_is_named(results, tmp_path):
    reference = verify.reference("drawn", results)
    place = runner.Place(runs=tmp_path / "fresh", progress=False)
    assert verify.finished_before(reference, 1000, place) == ""
    verify.fresh_run(reference, 1000, place)
    assert verify.finished_before(reference, 1000, place) == "1" * 8
    assert verify.finished_before(reference, 1001, place) == ""


def test_the_quick_size_may_be_the_full_one(results, module):
    module.QUICK = Config()
    assert len(verify.reference("drawn", results, size="quick").runs) == 4


def test_one_run_is_enough_where_nothing_is_random(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda: "1" * 40)
    monkeypatch.setattr(provenance, "commit_exists", lambda name: True)
    fig2 = registry.load("fig2")
    monkeypatch.setattr(fig2, "QUICK", fig2.SMOKE)
    monkeypatch.setattr(fig2, "SMOKE", dataclasses.replace(fig2.SMOKE, points=21))
    place = runner.Place(runs=tmp_path / "runs", progress=False)
    runner.run_experiment("fig2", fig2.QUICK, [0], place=place)
    reference = verify.reference("fig2", tmp_path / "none", size="quick", runs=place.runs)
    metrics = dict(reference.runs[0]["metrics"])
    assert {each.verdict for each in verify.compare(reference, metrics)} == {verify.INSIDE}
    metrics["value_at_zero.ard"] *= 1 + 1e-4
    assert [
        each.metric for each in verify.compare(reference, metrics) if each.verdict == verify.OUTSIDE
    ] == ["value_at_zero.ard"]
