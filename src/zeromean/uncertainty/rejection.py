"""Which predictions to keep, and what is wrong among those: selective prediction."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeromean.uncertainty.arrays import (
    ArrayLike,
    as_labels,
    as_probabilities,
    as_scores,
    like,
    require_fraction,
)

# Places at which tests of thresholds begin, and the most thresholds that are tested from one.
_NUM_STARTS, _MOST_TESTS = 10, 1000


class RiskCoverage(NamedTuple):
    """The share of errors among the surest predictions, for every number of them that is kept."""

    coverage: Tensor
    """1/n, 2/n, … 1: the share of examples that are kept."""
    risk: Tensor
    """The share of errors among these."""

    @property
    def area(self) -> float:
        """The average risk over all coverages (AURC)."""
        return self.risk.mean().item()


def risk_coverage(
    probabilities: ArrayLike, labels: ArrayLike, *, scores: ArrayLike | None = None
) -> RiskCoverage:
    """The risk-coverage curve (Geifman and El-Yaniv, 2017); `plot_risk_coverage` draws it.

    Examples of equal score count as if they were ordered at random.

    Args:
        scores: Uncertainties, larger ones rejected first, such as the mutual information. Default:
            one minus the highest probability.
    """
    numbers = as_probabilities(probabilities)
    wrong = (numbers.argmax(1) != as_labels(labels, numbers)).double()
    if scores is None:
        uncertainty = -numbers.amax(1)
    else:
        uncertainty = as_scores("scores", scores)
        _require_as_many("scores", uncertainty, len(wrong))
    _, group, count = uncertainty.unique(return_inverse=True, return_counts=True)
    rate = group.bincount(wrong, len(count)) / count
    kept = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    return RiskCoverage(kept / len(wrong), rate.repeat_interleave(count).cumsum(0) / kept)


def area_under_risk_coverage(
    probabilities: ArrayLike, labels: ArrayLike, *, scores: ArrayLike | None = None
) -> float:
    """AURC: the average, over all shares that may be kept, of the errors among the surest ones.

    Args:
        scores: As of `risk_coverage`.
    """
    return risk_coverage(probabilities, labels, scores=scores).area


class Rejection(NamedTuple):
    """What `reject` decided."""

    rejected: Any
    """Whether each example is one for a person, in the form of the probabilities."""
    threshold: float
    """Rejected are examples whose highest probability is below it."""
    coverage: float
    """The share of examples that is kept."""
    risk: float
    """Share of errors among these: what the probabilities admit, or the bound that was shown."""


def reject(
    probabilities: ArrayLike,
    *,
    coverage: float | None = None,
    risk: float | None = None,
    calibration: tuple[Any, Any] | None = None,
    confidence: float = 0.95,
) -> Rejection:
    """Which predictions to hand to a person: those whose highest probability is lowest.

    With `coverage` that share of the examples is kept. With `risk` as many are kept as the errors
    among them allow. Where `calibration` has labelled examples, the threshold comes from these, and
    the bound holds with the given confidence for any network (as of Geifman and El-Yaniv, 2017).
    Without, the errors are those that the probabilities admit, and worth as much as these.

    Args:
        coverage: The share of these examples that is kept, above 0 and up to 1; a few more where
            the highest probabilities are equal.
        risk: The largest share of errors among what is kept.
        calibration: `(probabilities, labels)` of examples that the network was not trained on.
        confidence: How often, over draws of the calibration data, the bound holds.
    """
    numbers = as_probabilities(probabilities)
    sure = numbers.amax(1)
    if (coverage is None) == (risk is None):
        raise TypeError("reject needs one of coverage=, the share to keep, and risk=, its errors.")
    if coverage is not None:
        if calibration is not None:
            raise TypeError("A coverage needs no calibration data; leave it out, or pass risk=.")
        threshold = _by_coverage(sure, require_fraction("coverage", coverage))
        expected = _admitted(sure[sure >= threshold])
    elif calibration is None:
        threshold = _by_admitted_risk(sure, require_fraction("risk", risk, ends="()"))
        expected = _admitted(sure[sure >= threshold])
    else:
        known = as_probabilities(calibration[0], "calibration probabilities")
        wrong = known.argmax(1) != as_labels(calibration[1], known, "calibration labels")
        bound = require_fraction("risk", risk, ends="()")
        miss = 1 - require_fraction("confidence", confidence, ends="()")
        threshold, expected = _by_bounded_risk(known.amax(1), wrong, bound, miss), bound
    rejected = sure < threshold
    kept = 1 - rejected.double().mean().item()
    return Rejection(like(rejected, probabilities), threshold, kept, expected)


def _by_coverage(sure: Tensor, coverage: float) -> float:
    # 0.07 · 100 is a little more than 7.
    kept = max(math.ceil(coverage * len(sure) - 1e-9), 1)
    return sure.sort(descending=True).values[kept - 1].item()


def _admitted(sure: Tensor) -> float:
    return (1 - sure).mean().item() if len(sure) else 0.0


def _by_admitted_risk(sure: Tensor, risk: float) -> float:
    thresholds, count = sure.unique(return_counts=True)
    thresholds, count = thresholds.flip(0), count.flip(0)
    admitted = ((1 - thresholds) * count).cumsum(0) / count.cumsum(0)
    allowed = thresholds[admitted <= risk]
    return allowed[-1].item() if len(allowed) else math.inf


def _by_bounded_risk(sure: Tensor, wrong: Tensor, risk: float, miss: float) -> float:
    """The lowest threshold whose error rate is shown to be at most `risk`.

    A threshold is shown to be good where so few errors had a small probability otherwise. Tests go
    from high thresholds to low ones, and end with the first that fails, which costs no confidence
    (Angelopoulos et al., 2021, Learn then Test); they begin at several places, which share it.
    """
    share = miss / _NUM_STARTS
    least = 1 - share ** (1 / len(sure))
    if least > risk:
        raise ValueError(
            f"{len(sure)} calibration examples cannot show a risk of {risk:.4g} with a confidence "
            f"of {1 - miss:.4g}, even without an error: {least:.4g} is the least; pass more "
            "examples, or a higher risk."
        )
    thresholds, group, count = sure.unique(return_inverse=True, return_counts=True)
    errors = group.bincount(wrong.double(), len(count)).flip(0).cumsum(0)
    thresholds, kept = thresholds.flip(0), count.flip(0).cumsum(0)
    looked_at = torch.linspace(0, len(kept) - 1, min(len(kept), _MOST_TESTS)).round().long()
    lowest = -1
    for start in torch.linspace(0, len(looked_at) - 1, _NUM_STARTS + 1).round().long()[1:]:
        for place in range(max(int(start), lowest + 1), len(looked_at)):
            at = looked_at[place]
            if _probability_of_so_few(int(errors[at]), int(kept[at]), risk) > share:
                break
            lowest = place
    return thresholds[looked_at[lowest]].item() if lowest >= 0 else math.inf


def _probability_of_so_few(errors: int, count: int, rate: float) -> float:
    """P(X ≤ errors) of a binomial X."""
    ways = torch.arange(errors + 1, dtype=torch.float64)
    size = torch.tensor(count, dtype=torch.float64)
    log_ways = (size + 1).lgamma() - (ways + 1).lgamma() - (size - ways + 1).lgamma()
    terms = log_ways + ways * math.log(rate) + (size - ways) * math.log1p(-rate)
    return terms.logsumexp(0).exp().item()


def _require_as_many(name: str, values: Tensor, count: int) -> None:
    if len(values) != count:
        raise ValueError(
            f"{name} must have one number for each of {count} examples, got {len(values)}."
        )
