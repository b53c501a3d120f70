"""How many members a deep ensemble needs to be as good."""

from __future__ import annotations

import math
from itertools import pairwise

from zeromean.arguments import require_numbers
from zeromean.uncertainty.arrays import ArrayLike, as_numbers


def deep_ensemble_equivalent(score: float, ensemble_scores: ArrayLike) -> float:
    """The size of a deep ensemble with the same score (Ashukha et al., 2020, arXiv 2002.06470).

    Between two sizes the ensemble's score is a straight line; 1 where even one member is as good,
    infinity where the largest ensemble is not.

    Args:
        score: What a method reaches, by `calibrated_log_likelihood`; higher is better.
        ensemble_scores: The same for deep ensembles of 1, 2, 3, … members.
    """
    require_numbers(score=score)
    if math.isnan(score):
        raise ValueError("score must be a number, got NaN.")
    scores = as_numbers("ensemble_scores", ensemble_scores, dims=1).tolist()
    if not scores:
        raise ValueError("ensemble_scores must begin with the score of one member, got none.")
    if scores[0] >= score:
        return 1.0
    for size, (fewer, more) in enumerate(pairwise(scores), 1):
        if more >= score:
            return size + (score - fewer) / (more - fewer)
    return math.inf
