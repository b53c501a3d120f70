"""Variational dropout for a quadratic data term: the solver behind regressor and classifier.

With every α at its optimum (`penalty`), what is left to minimise over the weights v, in units of
their standard errors, and over the noise precision β = τ², is

    -count log τ + ½ vᵀ R v - τ bᵀ v + ½ τ² c + Σ P(v).

The exact coordinate update of the talk, v = (R + diag(α))⁻¹ τ b and then α, is a step of
majorisation and crawls: weights on their way to zero shrink by a constant factor. Instead we take
Newton steps in v and τ together, on the weights that are not zero and those that want to become
so, stopping each weight at zero; ten or twenty do. Where such a step does not improve the
objective, the coordinate update, which always does, takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.dropout.penalty import (
    CONVEXIFYING,
    CURVATURE_AT_ZERO,
    Penalty,
    dropout_penalty,
)
from zeromean.estimators.likelihoods.noise_term import NoiseTerm
from zeromean.estimators.likelihoods.quadratic import Quadratic

# How far above 1 standard error a gradient has to be for its weight to leave zero.
ENTRY_MARGIN = 1e-9
FEWEST_ENTRIES = 10
HALVINGS = 6
ROUNDS = 5


@dataclass(frozen=True)
class Solution:
    """Weights in units of their standard errors, with their α, and √ of the noise precision."""

    v: Array
    alpha: Array
    tau: float
    objective: list[float]  # by iteration
    converged: bool

    @property
    def num_iterations(self) -> int:
        return len(self.objective) - 1


def minimize_dropout(
    quadratic: Quadratic,
    noise: NoiseTerm,
    start: Array,
    tau: float,
    *,
    max_iter: int,
    tol: float,
) -> Solution:
    """Improve weights (and √ noise precision) until an iteration gains less than `tol` nats."""
    active = np.flatnonzero(start)
    evaluate = _evaluator(quadratic, noise, active)
    here = evaluate(start[active], tau)
    objective = [here.objective]
    converged = False
    while len(objective) <= max_iter and not converged:
        before = here.objective
        place = _Place.around(quadratic, noise, here)
        step = _best_step(place)
        here = step or here
        if before - here.objective < tol and (step is None or not place.num_entering):
            escape = _escape(quadratic, noise, here)
            converged = escape is None
            here = escape or here
        objective.append(here.objective)
    v, alpha = np.zeros_like(start), np.full_like(start, np.inf)
    v[here.features], alpha[here.features] = here.values, here.penalty.alpha
    return Solution(v, alpha, here.tau, objective, converged)


def entering(pull: Array, num_active: int) -> Indices:
    """Zero weights that are pulled by more than one standard error, the worst first if many.

    All at once they would explain the same residual many times over.
    """
    pulled = np.flatnonzero(pull > 1 + ENTRY_MARGIN)
    limit = max(FEWEST_ENTRIES, num_active)
    if len(pulled) > limit:
        pulled = pulled[np.argpartition(-pull[pulled], limit)[:limit]]
    return pulled


@dataclass(frozen=True)
class _Point:
    """Weights that are not zero, √ of the noise precision, and the objective there."""

    features: Indices
    values: Array
    tau: float
    penalty: Penalty
    objective: float


def _evaluator(
    quadratic: Quadratic, noise: NoiseTerm, features: Indices, block: Array | None = None
) -> Callable[[Array, float], _Point]:
    """The objective as a function of the weights of some features, and of τ."""
    block = quadratic.block(features, features) if block is None else block
    linear = quadratic.linear[features]

    def evaluate(values: Array, tau: float) -> _Point:
        live = values != 0
        penalty = dropout_penalty(values[live])
        fit = 0.5 * values @ block @ values - tau * (linear @ values)
        objective = float(noise.value(tau) + fit + penalty.value.sum())
        return _Point(features[live], values[live], tau, penalty, objective)

    return evaluate


@dataclass(frozen=True)
class _Place:
    """A point, and what can be seen from it: slopes of weights, those that want to leave zero."""

    quadratic: Quadratic
    noise: NoiseTerm
    point: _Point
    num_entering: int
    features: Indices  # of the point first, then those entering
    values: Array
    gradient: Array  # of the data term
    block: Array
    linear: Array

    @classmethod
    def around(cls, quadratic: Quadratic, noise: NoiseTerm, point: _Point) -> _Place:
        active = point.features
        gradient = quadratic.product(active, point.values) - point.tau * quadratic.linear
        pull = np.abs(gradient)
        pull[active] = 0
        new = entering(pull, len(active))
        features = np.concatenate([active, new])
        return cls(
            quadratic,
            noise,
            point,
            len(new),
            features,
            np.concatenate([point.values, np.zeros(len(new))]),
            gradient[features],
            quadratic.block(features, features),
            quadratic.linear[features],
        )


def _best_step(place: _Place) -> _Point | None:
    step = _newton_step(place, damping=0.0)
    if step is None:
        step = _newton_step(place, damping=CONVEXIFYING)
        # That one is good at moving weights to and from zero, the next one at large weights.
        if step is None or not place.num_entering:
            steps = filter(None, [step, _coordinate_step(place)])
            step = min(steps, key=lambda each: each.objective, default=None)
    return step


def _newton_step(place: _Place, *, damping: float) -> _Point | None:
    point, noise, values = place.point, place.noise, place.values
    # Within one orthant the penalty is smooth.
    sign = np.where(values != 0, np.sign(values), -np.sign(place.gradient))
    at_zero = np.ones(place.num_entering)
    slope = place.gradient + sign * np.concatenate([point.penalty.slope, at_zero])
    curvature = np.concatenate([point.penalty.curvature, CURVATURE_AT_ZERO * at_zero])
    hessian = place.block + np.diag(curvature + damping)
    direction = _direction(hessian, slope, place.linear, noise, values, sign, point.tau)
    if direction is None:
        return None
    move, tau_move = direction
    evaluate = _evaluator(place.quadratic, noise, place.features, place.block)
    # Near the optimum, Newton's step is more exact than the objective by which it is judged.
    allowance = 0.0 if place.num_entering else noise.rounding(point.objective, point.tau**2)
    for halving in range(HALVINGS):
        length = 0.5**halving
        trial = values + length * move
        trial[trial * sign <= 0] = 0
        tau = point.tau + length * tau_move
        if tau > 0:
            step = evaluate(trial, tau)
            if step.objective < point.objective + allowance:
                return replace(step, objective=min(step.objective, point.objective))
        allowance = 0.0
    return None


def _direction(
    hessian: Array,
    slope: Array,
    linear: Array,
    noise: NoiseTerm,
    values: Array,
    sign: Array,
    tau: float,
) -> tuple[Array, float] | None:
    """Newton's direction for weights and τ; None where the Hessian is not positive.

    Weights that would pass through zero go to zero, and the others are asked again: a direction
    that counts on weights beyond zero is of no use.
    """
    free = np.ones(len(values), dtype=bool)
    move, tau_move = np.zeros(len(values)), 0.0
    for _ in range(ROUNDS):
        stopped = ~free
        move[stopped] = -values[stopped]
        pull = slope[free] + hessian[np.ix_(free, stopped)] @ move[stopped]
        try:
            factor = cho_factor(hessian[np.ix_(free, free)], lower=True, check_finite=False)
        except LinAlgError:
            return None
        free_linear = linear[free]
        if noise.fixed:
            move[free] = -cho_solve(factor, pull, check_finite=False)
        else:
            solved = cho_solve(factor, np.stack([pull, free_linear], axis=1), check_finite=False)
            tau_slope = tau * noise.square - noise.count / tau - linear @ values
            tau_slope -= linear[stopped] @ move[stopped]
            curvature = noise.square + noise.count / tau**2 - free_linear @ solved[:, 1]
            # Where the penalty is not convex enough, τ is left to the coordinate update.
            tau_move = 0.0
            if curvature > 0:
                tau_move = -float(tau_slope + free_linear @ solved[:, 0]) / float(curvature)
            move[free] = solved[:, 1] * tau_move - solved[:, 0]
        passing = free & ((values + move) * sign <= 0)
        if not passing.any():
            break
        free &= ~passing
    return move, tau_move


def _coordinate_step(place: _Place) -> _Point | None:
    """What hardly fails: one weight enters at its own optimum, else the talk's updates."""
    point, noise = place.point, place.noise
    if place.num_entering:
        pull = np.abs(place.gradient)
        pull[: len(point.features)] = 0
        first = int(np.argmax(pull))
        values = place.values.copy()
        values[first] = _best_alone(-float(place.gradient[first]), float(place.block[first, first]))
    else:
        system = place.block + np.diag(point.penalty.alpha)
        try:
            factor = cho_factor(system, lower=True, check_finite=False)
        except LinAlgError:  # Features that are alike up to rounding, with hardly any noise.
            return None
        values = cho_solve(factor, point.tau * place.linear, check_finite=False)
    tau = point.tau if noise.fixed else noise.best_tau(float(place.linear @ values))
    step = _evaluator(place.quadratic, noise, place.features, place.block)(values, tau)
    return step if step.objective < point.objective else None


def _escape(quadratic: Quadratic, noise: NoiseTerm, point: _Point) -> _Point | None:
    """A way down from a saddle, if the point is one: where equal features share a weight.

    Along the direction of negative curvature, to where the first weight becomes zero.
    """
    values = point.values
    block = quadratic.block(point.features, point.features)
    hessian = block + np.diag(point.penalty.curvature)
    try:
        cho_factor(hessian, lower=True, check_finite=False)
        return None
    except LinAlgError:
        _, vectors = eigh(hessian, subset_by_index=[0, 0], check_finite=False)
    evaluate = _evaluator(quadratic, noise, point.features, block)
    steps = []
    for direction in (vectors[:, 0], -vectors[:, 0]):
        shrinking = direction * values < 0
        if not shrinking.any():
            continue
        lengths = np.full(len(values), np.inf)
        lengths[shrinking] = np.abs(values[shrinking] / direction[shrinking])
        first = np.argmin(lengths)
        trial = values + lengths[first] * direction
        trial[first] = 0
        steps.append(evaluate(trial, point.tau))
    step = min(steps, key=lambda step: step.objective, default=point)
    return step if step.objective < point.objective else None


def _best_alone(pull: float, curvature: float) -> float:
    """Where one weight by itself is best: curvature · v + P'(v) = |pull|, which is above 1."""
    size = abs(pull) / curvature
    for _ in range(50):
        penalty = dropout_penalty(np.array([size]))
        excess = curvature * size + penalty.slope[0] - abs(pull)
        move = excess / max(curvature + penalty.curvature[0], 0.5 * curvature)
        size = max(size - move, 0.5 * size)
        if abs(move) < 1e-12 * size:
            break
    return float(np.copysign(size, pull))
