"""Variational dropout for logistic regression.

The lower bound is Σ E log σ(±m + s y) - Σ KL(α) with m = Xw and s² = X²(α w²). About the current
posterior the data term is quadratic in w and linear in the variances, to first order in the latter:
what is left is a dropout problem with a quadratic data term, which `dropout` solves exactly. Its
solution is the next posterior, or where that would lower the bound, a point on the way to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.special import dawsn

from zeromean.estimators.dropout import NoiseTerm, Solution, minimize_dropout
from zeromean.estimators.logistic import (
    Curvatures,
    Features,
    Integral,
    JointCurvatures,
    Scaling,
    Slopes,
    curvatures,
    joint_curvatures,
    slopes,
)
from zeromean.estimators.penalty import Array, dropout_penalty, kl_divergence
from zeromean.estimators.quadratic import Indices, MatrixQuadratic
from zeromean.estimators.rows import Rows

NO_NOISE = NoiseTerm(count=0.0, square=0.0, fixed=True)
FEWEST_ENTRIES = 10
# From 0.25 on, the damped model is convex, and its optimum lies downhill.
DAMPINGS = (0, 0.25, *(4.0**power for power in range(12)))


@dataclass(frozen=True)
class DropoutPosterior:
    """Independent weights of the features that are not exactly zero."""

    features: Indices
    mean: Array
    std: Array
    intercept: float

    def logit_variance(self, features: Features) -> Array:
        return features.columns(self.features) ** 2 @ self.std**2

    def kl(self) -> float:
        return float(kl_divergence(np.abs(self.mean) / (np.sqrt(2) * self.std)).sum())


@dataclass
class DropoutFit:
    posterior: DropoutPosterior
    bound: list[float]
    num_iterations: int = 0
    converged: bool = False


def fit_dropout_logistic(
    rows: Rows,
    label: object,
    scaling: Scaling,
    integral: Integral,
    *,
    start_intercept: float,
    fit_intercept: bool,
    max_iter: int,
    tol: float,
) -> DropoutFit:
    """Maximise the bound for one class against the rest, until a step gains less than `tol`."""

    def slopes_at(posterior: DropoutPosterior) -> Slopes:
        return rows.reduce(slopes, label, scaling, posterior, integral)

    nothing = np.zeros(0)
    posterior = DropoutPosterior(np.zeros(0, dtype=np.intp), nothing, nothing, start_intercept)
    at = slopes_at(posterior)
    fit = DropoutFit(posterior, [at.value])
    settled = False  # Whether the same weights are zero as before.
    while fit.num_iterations < max_iter:
        fit.num_iterations += 1
        before = fit.posterior
        chosen, num_entering = _working_set(before, at)
        newton = None
        if settled and not num_entering:
            joint = rows.reduce(joint_curvatures, label, scaling, before)
            newton = _newton_step(before, at, joint, fit_intercept)
        find_hessian = partial(rows.reduce, curvatures, label, scaling, before, integral, chosen)
        for trial in _trials(newton, before, at, find_hessian, chosen, fit_intercept):
            at_trial = slopes_at(trial)
            bound = at_trial.value - trial.kl()
            if bound > fit.bound[-1]:
                break
        else:  # Rounding errors are all that is left.
            fit.converged = True
            break
        gain = bound - fit.bound[-1]
        fit.posterior, at = trial, at_trial
        fit.bound.append(bound)
        if gain < tol and not num_entering:
            fit.converged = True
            break
        settled = np.array_equal(trial.features, before.features)
    return fit


def _working_set(posterior: DropoutPosterior, at: Slopes) -> tuple[Indices, int]:
    """The live features, and those that want to enter: the worst first if they are many."""
    pull = np.zeros_like(at.slope)
    varying = at.spread > 0
    pull[varying] = np.abs(at.slope[varying]) / np.sqrt(at.spread[varying])
    pull[posterior.features] = 0
    entering = np.flatnonzero(pull > 1 + 1e-9)
    limit = max(FEWEST_ENTRIES, len(posterior.features))
    if len(entering) > limit:
        entering = entering[np.argpartition(-pull[entering], limit)[:limit]]
    return np.concatenate([posterior.features, entering]), len(entering)


def _trials(
    newton: DropoutPosterior | None,
    before: DropoutPosterior,
    at: Slopes,
    find_hessian: Callable[[], Curvatures],
    chosen: Indices,
    fit_intercept: bool,
) -> Iterator[DropoutPosterior]:
    """Posteriors to try, the boldest first."""
    if newton is not None:
        yield newton
    hessian = find_hessian()
    for damping in DAMPINGS:
        yield _solve(before, at, hessian, chosen, fit_intercept, damping)


def _solve(
    posterior: DropoutPosterior,
    at: Slopes,
    hessian: Curvatures,
    chosen: Indices,
    fit_intercept: bool,
    damping: float,
) -> DropoutPosterior:
    """The optimum of the quadratic model of the bound, held back by `damping`."""
    slope, block = at.slope[chosen], hessian.block
    if fit_intercept:  # It follows the weights.
        block = block - np.outer(hessian.column, hessian.column) / hessian.corner
        slope = slope - hessian.column * (at.intercept_slope / hessian.corner)
    root = np.sqrt(at.spread[chosen])
    num_live = len(posterior.features)
    before = np.concatenate([posterior.mean, np.zeros(len(chosen) - num_live)])
    matrix = block / np.outer(root, root) + damping * np.eye(len(chosen))
    start = before * root
    solution = minimize_dropout(
        MatrixQuadratic(matrix, matrix @ start + slope / root),
        NO_NOISE,
        Solution(start.copy(), 1.0),
        max_iter=100,
        tol=1e-9,
    )
    mean = solution.v / root
    intercept = posterior.intercept
    if fit_intercept:
        pull = at.intercept_slope - hessian.column @ (mean - before)
        intercept += float(pull / hessian.corner)
    live = mean != 0
    std = np.zeros_like(mean)
    std[live] = np.sqrt(dropout_penalty(solution.v[live]).alpha) * np.abs(mean[live])
    share = 1 / (1 + damping)
    std[:num_live] = std[:num_live] ** share * posterior.std ** (1 - share)
    return DropoutPosterior(chosen[live], mean[live], std[live], intercept)


def _newton_step(
    posterior: DropoutPosterior, at: Slopes, joint: JointCurvatures, fit_intercept: bool
) -> DropoutPosterior | None:
    """Newton's step in weights, log standard deviations and intercept, where there is one."""
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
    try:
        move = cho_solve(cho_factor(-hessian, check_finite=False), slope, check_finite=False)
    except LinAlgError:
        return None
    trial = mean + move[:size]
    # It is not for this step to take weights through zero.
    trial = np.where(trial * mean > 0, trial, 0.1 * mean)
    log_ratio = np.clip(move[size + 1 :], -2, 2)
    intercept = posterior.intercept + float(move[size])
    return DropoutPosterior(posterior.features, trial, std * np.exp(log_ratio), intercept)
