"""How well a score tells foreign inputs from those that a model knows; larger means foreign."""

from __future__ import annotations

import torch
from torch import Tensor

from zeromean.uncertainty.arrays import ArrayLike, as_scores


def auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """The probability that a foreign score is higher than a known one; ties count one half.

    Args:
        inside: Scores of inputs that the model knows.
        outside: Scores of foreign ones.
    """
    known, foreign = as_scores("inside", inside), as_scores("outside", outside)
    ordered = known.sort().values
    below = torch.searchsorted(ordered, foreign, side="left")
    not_above = torch.searchsorted(ordered, foreign, side="right")
    return ((below + not_above).double().mean() / (2 * len(known))).item()


def aupr(inside: ArrayLike, outside: ArrayLike) -> float:
    """Average precision at finding the foreign; chance is their share of all inputs.

    Args:
        inside: Scores of inputs that the model knows.
        outside: Scores of foreign ones.
    """
    known, foreign = as_scores("inside", inside), as_scores("outside", outside)
    false_alarms, found = _flagged(known, foreign)
    gained = found.diff(prepend=found.new_zeros(1))
    return (gained * found / (found + false_alarms)).sum().item() / len(foreign)


def fpr95(inside: ArrayLike, outside: ArrayLike) -> float:
    """Share of known inputs that are flagged where 95% of the foreign ones are.

    Args:
        inside: Scores of inputs that the model knows.
        outside: Scores of foreign ones.
    """
    known, foreign = as_scores("inside", inside), as_scores("outside", outside)
    false_alarms, found = _flagged(known, foreign)
    enough = found >= 0.95 * len(foreign)
    return (false_alarms[enough][0] / len(known)).item()


def _flagged(known: Tensor, foreign: Tensor) -> tuple[Tensor, Tensor]:
    """How many of both score at least as high as each threshold, from the highest down."""
    thresholds = torch.cat([known, foreign]).unique().flip(0)

    def count(scores: Tensor) -> Tensor:
        below = torch.searchsorted(scores.sort().values, thresholds, side="left")
        return (len(scores) - below).double()

    return count(known), count(foreign)
