"""Intervals against tables, and against how often they hold what they should."""

import numpy as np
import pytest

from zeromean.experiments.runs.intervals import mean_interval, median_interval, prediction_interval


def test_mean_interval_is_that_of_the_tables():
    # t = 4.303 for two degrees of freedom; the standard error is 1 / √3.
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3
    )


def test_prediction_interval_is_that_of_the_tables():
    # t = 9.925 for two degrees of freedom and 99%.
    half = 9.925 * (1 + 1 / 3) ** 0.5
    assert prediction_interval([1.0, 2.0, 3.0], 0.99) == pytest.approx(
        (2 - half, 2 + half), abs=2e-3
    )


@pytest.mark.parametrize("interval", [mean_interval, median_interval])
def test_interval_holds_the_truth_as_often_as_it_says(interval):
    draws = np.random.default_rng(1).normal(size=(300, 10))
    held = np.mean([low <= 0 <= high for low, high in map(interval, draws.tolist())])
    # Three standard errors of 300 draws; the bootstrap of a median has a little less.
    assert held >= 0.95 - 3 * (0.95 * 0.05 / 300) ** 0.5 - 0.01 * (interval is median_interval)


def test_prediction_interval_holds_the_next_value():
    draws = np.random.default_rng(2).normal(size=(2000, 4))
    bounds = [prediction_interval(row[:3], 0.9) for row in draws.tolist()]
    held = np.mean([low <= row[3] <= high for (low, high), row in zip(bounds, draws, strict=True)])
    assert abs(held - 0.9) < 4 * (0.9 * 0.1 / 2000) ** 0.5


def test_median_interval_is_always_the_same():
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    assert median_interval(values) == median_interval(values)


def test_one_value_has_no_interval():
    with pytest.raises(ValueError, match="takes two values at least, got 1"):
        prediction_interval([1.0], 0.99)
