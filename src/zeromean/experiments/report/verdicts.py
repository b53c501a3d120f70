"""When a claim is confirmed by our runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from zeromean.experiments.report.records import RecordedClaim, Run
from zeromean.experiments.runs.intervals import mean_interval, median_interval

CONFIRMED = "confirmed"
REFUTED = "refuted"
OPEN = "open"
SEEN_TWICE = "seen twice"
SEEN_ONCE = "seen once"
NOT_SEEN = "not seen"
NOT_JUDGED = "not judged"
NOT_MEASURED = "not measured"
NOT_RUN = "not run"
JUDGED = (CONFIRMED, REFUTED, OPEN, SEEN_TWICE, SEEN_ONCE, NOT_SEEN)

# A bootstrap of fewer than six values has no 95% interval of their median.
FEWEST = {"mean": 3, "median": 6}
RULE = (
    "Claims of the documents and bounds of our own stand in tables of their own; tolerances are "
    "always ours. A claim is confirmed where the whole 95% interval of our mean over seeds "
    "(Student’s t; a bootstrap where it says median) satisfies it within the tolerance, refuted "
    "where the whole interval does not, and open in between. That takes three seeds (six for a "
    "median), or an experiment in which nothing is random. With fewer, what satisfied it is seen "
    "once or seen twice, and what did not is not seen. Runs of another size than the full one are "
    "not judged."
)


@dataclass(frozen=True)
class Summary:
    """Mean over seeds and its standard error, which one seed does not have."""

    mean: float
    stderr: float | None
    count: int


@dataclass(frozen=True)
class Measured:
    """What a claim is judged by.

    Attributes:
        values: One for each seed; none where the runs have intervals only.
        centre: Their mean or median, as the claim says.
        interval: Where that is known to lie; None where there are too few seeds.
        count: Number of seeds.
    """

    values: tuple[float, ...]
    centre: float | None
    interval: tuple[float, float] | None
    count: int


def summarize(values: Sequence[float]) -> Summary | None:
    """The mean of some measurements, None where there are none."""
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Summary(sum(values), None, len(values))  # inf or nan, as it should be
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Summary(statistics.fmean(values), stderr, len(values))


def measure(
    claim: RecordedClaim, runs: Sequence[Run], *, deterministic: bool = False
) -> Measured | None:
    """What some runs say about a claim, None where they do not."""
    having = [run for run in runs if all(metric in run.metrics for metric in claim.metrics)]
    if not having:
        return None
    if claim.seeds_in_run:
        return _measure_inside(claim, having)
    values = tuple(run.metrics[claim.metric] for run in having)
    if not all(map(math.isfinite, values)):
        return Measured(values, sum(values), None, len(values))
    centre = (statistics.median if claim.statistic == "median" else statistics.fmean)(values)
    interval = None
    if deterministic:
        interval = min(values), max(values)
    elif len(values) >= FEWEST[claim.statistic]:
        interval = (median_interval if claim.statistic == "median" else mean_interval)(values)
    return Measured(values, centre, interval, len(values))


def _measure_inside(claim: RecordedClaim, runs: Sequence[Run]) -> Measured:
    """Runs that have several seeds each: the interval that holds the intervals of all of them."""
    low, high = claim.metrics
    counts = [run.config.get(claim.seeds_in_run, 1) for run in runs]
    ends = min(run.metrics[low] for run in runs), max(run.metrics[high] for run in runs)
    known = min(counts) >= FEWEST["mean"] and all(map(math.isfinite, ends))
    return Measured((), None, ends if known else None, sum(counts))


def bounds(claim: RecordedClaim) -> tuple[float, float]:
    """Between which numbers the claim is satisfied."""
    low = -math.inf if claim.direction == "at most" else claim.value - claim.tolerance
    high = math.inf if claim.direction == "at least" else claim.value + claim.tolerance
    return low, high


def judge(claim: RecordedClaim, ours: Measured | None) -> str:
    """The verdict by RULE."""
    if ours is None:
        return NOT_MEASURED
    low, high = bounds(claim)
    # 99.4 − 0.15 is not 99.25 in binary: what lies on the bound counts as inside.
    slack = 1e-9 * (abs(claim.value) + claim.tolerance)
    low, high = low - slack, high + slack
    if ours.interval is not None:
        if low <= ours.interval[0] and ours.interval[1] <= high:
            return CONFIRMED
        return REFUTED if ours.interval[1] < low or ours.interval[0] > high else OPEN
    if ours.count >= FEWEST["mean"]:
        return OPEN  # Some seed has failed, or they are too few for a median.
    seen = sum(low <= value <= high for value in ours.values)
    return {0: NOT_SEEN, 1: SEEN_ONCE}.get(seen, SEEN_TWICE)
