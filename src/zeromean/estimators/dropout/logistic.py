"""Variational dropout for logistic regression.

The lower bound is Σ E log σ(±m + s y) - Σ KL(α) with m = Xw and s² = X²(α w²). About the current
posterior the data term is quadratic in w and linear in the variances, to first order in the latter:
what is left is a dropout problem with a quadratic data term, which `dropout` solves exactly. Its
solution is the next posterior, or where that would lower the bound, a point on the way to it. Once
the features have settled, Newton's method in everything together ends the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zeromean.estimators.array_types import Indices
from zeromean.estimators.ascent import Ascent, Proposal, ascend
from zeromean.estimators.dropout.joint import HOLDS, JointModel
from zeromean.estimators.dropout.posterior import DropoutPosterior
from zeromean.estimators.dropout.search import Solution, entering, minimize_dropout
from zeromean.estimators.evidence.feature_prior import FREE
from zeromean.estimators.evidence.search import (
    ROUGHLY,
    EvidenceSolution,
    maximize_evidence,
    with_all_that_matter,
)
from zeromean.estimators.likelihoods.logistic import (
    DataTerm,
    QuadraticModel,
    Slopes,
    pulls,
)
from zeromean.estimators.likelihoods.noise_term import NO_NOISE
from zeromean.estimators.likelihoods.quadratic import MatrixQuadratic

INNER_ITERATIONS = 100
# Tolerance of the quadratic models, in parts of the last gain, and the smallest one in nats.
INNER_SHARE = 1e-3
FINEST = 1e-9
# Features that enter, in parts of those inside, with which Newton's method is of use.
FEW_ENTERING = 0.1
# From 0.25 on, the damped model is convex, and its optimum lies downhill.
DAMPINGS = (0, 0.25, *(4.0**power for power in range(12)))


def search_dropout_logistic(
    term: DataTerm, *, max_iter: int, tol: float
) -> Ascent[DropoutPosterior]:
    """The better of two optima for one class against the rest.

    From the empty model, and from one with all features that matter given each other: some are
    relevant only together.
    """
    forward = _fit(term, DropoutPosterior.empty(term.start_intercept), max_iter, tol)
    model = QuadraticModel.of_all_features(term, forward.posterior)
    if model is None:
        return forward
    larger = _with_all_that_matter(model)
    if set(larger.features) == set(forward.posterior.features):
        return forward
    backward = _fit(term, larger, max_iter, tol)
    return backward if backward.bound[-1] > forward.bound[-1] else forward


def _with_all_that_matter(model: QuadraticModel) -> DropoutPosterior:
    """The optimum of a quadratic model from a start at which all features have a say."""
    nothing = EvidenceSolution.empty(noise_precision=1.0)
    start = with_all_that_matter(model.quadratic, NO_NOISE, nothing)
    maximize_evidence(
        model.quadratic, NO_NOISE, start, prices=FREE, max_iter=INNER_ITERATIONS, tol=ROUGHLY
    )
    v = np.zeros(len(model.chosen))
    v[start.features] = start.mean
    solution = minimize_dropout(
        model.quadratic, NO_NOISE, v, tau=1.0, max_iter=INNER_ITERATIONS, tol=ROUGHLY
    )
    return _posterior(model, solution)


def _fit(
    term: DataTerm, start: DropoutPosterior, max_iter: int, tol: float
) -> Ascent[DropoutPosterior]:
    course = _Course(term)
    return ascend(term, start, course.propose, DropoutPosterior.kl, max_iter=max_iter, tol=tol)


@dataclass
class _Course:
    """Where steps come from: the last one that was taken says which to try first."""

    term: DataTerm
    by_newton: bool = False
    left_over: bool = False  # weights that Newton's method would take through zero
    damping: int = 0  # of the quadratic model
    holding: int = 0  # of Newton's method
    bound: float = -np.inf
    gained: float = np.inf

    def propose(self, before: DropoutPosterior, at: Slopes) -> Proposal[DropoutPosterior]:
        bound = at.value - before.kl()
        self.gained, self.bound = bound - self.bound, bound
        new = entering(pulls(before, at), len(before.features))
        # Newton's method knows nothing of features that come and go: many are for the other one.
        few = len(new) <= FEW_ENTERING * len(before.features)
        by_newton = few and not (self.by_newton and (self.left_over or len(new)))
        bold = self.holding <= 1 if by_newton else self.damping <= 1
        trials = self._trials(before, at, new, by_newton and len(before.features) > 0)
        return Proposal(trials, may_end=bold and not len(new))

    def _trials(
        self, before: DropoutPosterior, at: Slopes, new: Indices, by_newton: bool
    ) -> Iterator[DropoutPosterior]:
        if by_newton:
            joint = JointModel.about(self.term, before, at)
            for place in range(max(self.holding - 1, 0), len(HOLDS)):
                trial = joint and joint.step(before, HOLDS[place])
                if trial:
                    self.by_newton, self.holding, self.left_over = True, place, trial.left_over
                    yield trial.posterior
            self.holding = 0
        chosen = np.concatenate([before.features, new])
        model = QuadraticModel.about(self.term, before, at, chosen)
        if model is None:
            return
        # Digits beyond those of the model itself would be lost in the next one.
        tol = float(np.clip(INNER_SHARE * self.gained, FINEST, ROUGHLY))
        for place in range(max(self.damping - 1, 0), len(DAMPINGS)):
            self.by_newton, self.damping = False, place
            yield _optimum(model, before, DAMPINGS[place], tol)


def _optimum(
    model: QuadraticModel, before: DropoutPosterior, damping: float, tol: float
) -> DropoutPosterior:
    """The optimum of the quadratic model of the bound, held back by `damping`."""
    start = model.start * model.root
    solution = minimize_dropout(
        MatrixQuadratic(
            model.matrix + damping * np.eye(len(start)), model.linear + damping * start
        ),
        NO_NOISE,
        start,
        tau=1.0,
        max_iter=INNER_ITERATIONS,
        tol=tol,
    )
    optimum = _posterior(model, solution)
    # The features of `before` are the first of those chosen, in the same order.
    old = solution.v[: len(before.features)] != 0
    share = 1 / (1 + damping)
    std = optimum.std
    std[: old.sum()] = std[: old.sum()] ** share * before.std[old] ** (1 - share)
    return optimum


def _posterior(model: QuadraticModel, solution: Solution) -> DropoutPosterior:
    mean = solution.v / model.root
    live = mean != 0
    std = np.sqrt(solution.alpha[live]) * np.abs(mean[live])
    return DropoutPosterior(model.chosen[live], mean[live], std, model.intercept(mean))
