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
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh
from scipy.special import dawsn

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.ascent import Ascent, Proposal, ascend
from zeromean.estimators.dropout.penalty import kl_divergence
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
    JointCurvatures,
    QuadraticModel,
    Slopes,
    pulls,
)
from zeromean.estimators.likelihoods.noise_term import NO_NOISE
from zeromean.estimators.likelihoods.quadratic import MatrixQuadratic
from zeromean.estimators.rows.columns import Features

INNER_ITERATIONS = 100
# In parts of the largest, where the bound has no optimum for Newton's step to go to.
SMALLEST_CURVATURE = 1e-8
# From 0.25 on, the damped model is convex, and its optimum lies downhill.
DAMPINGS = (0, 0.25, *(4.0**power for power in range(12)))


@dataclass(frozen=True)
class DropoutPosterior:
    """Independent weights of the features that are not exactly zero."""

    features: Indices
    mean: Array
    std: Array
    intercept: float

    @classmethod
    def empty(cls, intercept: float) -> DropoutPosterior:
        return cls(np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros(0), intercept)

    def part(self, kept: Array) -> DropoutPosterior:
        return DropoutPosterior(
            self.features[kept], self.mean[kept], self.std[kept], self.intercept
        )

    def logit_variance(self, features: Features) -> Array:
        return features.columns(self.features) ** 2 @ self.std**2

    def log_alpha(self) -> Array:
        return 2 * np.log(self.std / np.abs(self.mean))

    def kl(self) -> float:
        return float(kl_divergence(np.abs(self.mean) / (np.sqrt(2) * self.std)).sum())


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
    last: Indices | None = None

    def propose(before: DropoutPosterior, at: Slopes) -> Proposal[DropoutPosterior]:
        nonlocal last
        settled = last is not None and np.array_equal(before.features, last)
        last = before.features
        new = entering(pulls(before, at), len(before.features))
        trials = _trials(term, before, at, new, settled and not len(new))
        return Proposal(trials, may_end=not len(new))

    return ascend(term, start, propose, DropoutPosterior.kl, max_iter=max_iter, tol=tol)


def _trials(
    term: DataTerm, before: DropoutPosterior, at: Slopes, new: Indices, settled: bool
) -> Iterator[DropoutPosterior]:
    if settled and len(before.features):
        newton = _newton_step(before, at, term.joint_curvatures(before), term.fit_intercept)
        if newton is not None:
            yield newton
    chosen = np.concatenate([before.features, new])
    model = QuadraticModel.about(term, before, at, chosen)
    if model is None:
        return
    for damping in DAMPINGS:
        yield _optimum(model, before, damping)


def _optimum(model: QuadraticModel, before: DropoutPosterior, damping: float) -> DropoutPosterior:
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
        tol=1e-9,
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


def _newton_step(
    posterior: DropoutPosterior, at: Slopes, joint: JointCurvatures, fit_intercept: bool
) -> DropoutPosterior | None:
    """Newton's step in weights, log standard deviations and intercept."""
    mean, std, size = posterior.mean, posterior.std, len(posterior.features)
    variance = std**2
    z = np.abs(mean) / (np.sqrt(2) * std)
    # Derivatives of the KL in log z.
    first = 2 * z * dawsn(z)
    second = first + 2 * z * (z - z * first)
    spread = at.spread[posterior.features]
    slope = np.concatenate(
        [
            at.slope[posterior.features] - first / mean,
            [at.intercept_slope],
            first - spread * variance,
        ]
    )
    hessian = np.zeros((2 * size + 1, 2 * size + 1))
    hessian[: size + 1, : size + 1] = joint.means
    hessian[: size + 1, size + 1 :] = joint.mixed * (2 * variance)
    hessian[size + 1 :, size + 1 :] = joint.variances * np.outer(2 * variance, 2 * variance)
    weights, log_stds = np.arange(size), size + 1 + np.arange(size)
    hessian[weights, weights] -= (second - first) / mean**2
    hessian[weights, log_stds] += second / mean
    hessian[log_stds, log_stds] -= second + 2 * spread * variance
    hessian[size + 1 :, : size + 1] = hessian[: size + 1, size + 1 :].T
    if not fit_intercept:
        slope[size] = 0
        hessian[size] = hessian[:, size] = 0
        hessian[size, size] = -1
    if not np.isfinite(hessian).all():
        return None
    try:
        move = cho_solve(cho_factor(-hessian, check_finite=False), slope, check_finite=False)
    except LinAlgError:
        # A saddle: away from it where the bound curves upwards, as fast as towards an optimum.
        values, vectors = eigh(-hessian, check_finite=False)
        sizes = np.maximum(np.abs(values), SMALLEST_CURVATURE * np.abs(values).max())
        move = vectors @ ((vectors.T @ slope) / sizes)
    trial = mean + move[:size]
    # It is not for this step to take weights through zero.
    trial = np.where(trial * mean > 0, trial, 0.1 * mean)
    log_ratio = np.clip(move[size + 1 :], -2, 2)
    intercept = posterior.intercept + float(move[size])
    return DropoutPosterior(posterior.features, trial, std * np.exp(log_ratio), intercept)
