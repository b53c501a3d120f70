"""When a claim of a paper is confirmed by our runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from zeromean.report.records import Claim

CONFIRMED = "confirmed"
NOT_CONFIRMED = "not confirmed"
DIFFERENT_DIRECTION = "different direction"
NOT_MEASURED = "not measured"
NOT_RUN = "not run"

RULE = (
    "A claim is confirmed where the mean over our seeds is within the tolerance of the paper’s "
    "number or, for “at least” and “at most”, beyond it on the claimed side. It "
    "goes in a different direction where a one-sided claim is missed by more than the tolerance "
    "and two standard errors together, which takes two seeds or more. Everything else is not "
    "confirmed. ± is one standard error of the mean over n seeds."
)


@dataclass(frozen=True)
class Summary:
    """Mean over seeds and its standard error, which one seed does not have."""

    mean: float
    stderr: float | None
    count: int


def summarize(values: Sequence[float]) -> Summary | None:
    """The mean of some measurements, None where there are none."""
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Summary(sum(values), None, len(values))  # inf or nan, as it should be
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Summary(statistics.fmean(values), stderr, len(values))


def bounds(claim: Claim) -> tuple[float, float]:
    """The interval in which our mean confirms the claim."""
    low = -math.inf if claim.direction == "at most" else claim.paper - claim.tolerance
    high = math.inf if claim.direction == "at least" else claim.paper + claim.tolerance
    return low, high


def judge(claim: Claim, ours: Summary | None) -> str:
    """The verdict by RULE."""
    if ours is None:
        return NOT_MEASURED
    low, high = bounds(claim)
    # 99.4 − 0.15 is not 99.25 in binary: a mean on the bound counts as inside.
    slack = 1e-9 * (abs(claim.paper) + claim.tolerance)
    if low - slack <= ours.mean <= high + slack:
        return CONFIRMED
    if claim.direction == "equal" or ours.stderr is None:
        return NOT_CONFIRMED
    missed_by = max(low - ours.mean, ours.mean - high)
    return DIFFERENT_DIRECTION if missed_by > 2 * ours.stderr + slack else NOT_CONFIRMED
