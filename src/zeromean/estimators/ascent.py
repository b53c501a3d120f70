"""Ascent of a lower bound by trial posteriors: the loop that both classifiers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from zeromean.estimators.likelihoods.logistic import DataTerm, Slopes, WeightPosterior

P = TypeVar("P", bound=WeightPosterior)


@dataclass
class Ascent(Generic[P]):
    """The posterior where it ended, and the bound on the way there."""

    posterior: P
    bound: list[float]
    num_iterations: int = 0
    converged: bool = False


class Proposal(NamedTuple, Generic[P]):
    """Posteriors to try, the boldest first, and whether they may be the last."""

    trials: Iterable[P]
    may_end: bool = True


def ascend(
    term: DataTerm,
    start: P,
    propose: Callable[[P, Slopes], Proposal[P]],
    cost: Callable[[P], float],
    *,
    max_iter: int,
    tol: float,
    patience: int = 1,
) -> Ascent[P]:
    """Move to the first proposal that raises the bound, until that gains less than `tol` nats.

    Args:
        propose: From a posterior and the slopes of the data term there.
        cost: What the bound is less than the data term.
        patience: How many such gains in a row end it.
    """
    at = term.slopes(start)
    ascent = Ascent(start, [at.value - cost(start)])
    num_small = 0
    while ascent.num_iterations < max_iter and not ascent.converged:
        ascent.num_iterations += 1
        before = ascent.bound[-1]
        proposal = propose(ascent.posterior, at)
        for trial in proposal.trials:
            at_trial = term.slopes(trial)
            bound = at_trial.value - cost(trial)
            if bound > before:
                ascent.posterior, at = trial, at_trial
                num_small = num_small + 1 if bound - before < tol and proposal.may_end else 0
                ascent.converged = num_small >= patience
                break
        else:  # Rounding errors are all that is left.
            bound = before
            ascent.converged = True
        ascent.bound.append(bound)
    return ascent
