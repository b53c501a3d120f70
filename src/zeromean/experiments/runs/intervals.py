"""Intervals from a handful of seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

RESAMPLES = 9999


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's t-interval of the mean; it takes two values at least."""
    quantile = _quantile(confidence, len(values))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The bootstrap's percentile interval of the median, always from the same resamples."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(drawn, axis=1), (tail, 1 - tail))
    return float(low), float(high)


def prediction_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Where the next value lies, for normal values of unknown mean and variance."""
    quantile = _quantile(confidence, len(values))
    half = quantile * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def _quantile(confidence: float, count: int) -> float:
    if count < 2:
        raise ValueError(f"an interval takes two values at least, got {count}.")
    return float(stdtrit(count - 1, (1 + confidence) / 2))
