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

from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh

from zeromean.estimators.penalty import CONVEXIFYING, Array, dropout_penalty
from zeromean.estimators.quadratic import Indices, Quadratic

# How far above 1 a standardised gradient has to be for its weight to leave zero.
ENTRY_MARGIN = 1e-9
FEWEST_ENTRIES = 10
HALVINGS = 6
ROUNDS = 5


@dataclass
class Solution:
    """Weights in units of their standard errors, √ of the noise precision, and the way there."""

    v: Array
    tau: float
    objective: list[float] = field(default_factory=list)
    num_iterations: int = 0
    converged: bool = False


@dataclass(frozen=True)
class NoiseTerm:
    """-count log τ + ½ τ² square, minimised over τ too where it is not fixed."""

    count: float
    square: float
    fixed: bool

    def value(self, tau: float) -> float:
        return 0.5 * tau**2 * self.square - self.count * float(np.log(tau))

    def best_tau(self, projection: float) -> float:
        """The optimum for given weights, `projection` being bᵀ v."""
        root = np.sqrt(projection**2 + 4 * self.count * self.square)
        return float((projection + root) / (2 * self.square))


def minimize_dropout(
    quadratic: Quadratic,
    noise: NoiseTerm,
    solution: Solution,
    *,
    max_iter: int,
    tol: float,
) -> Solution:
    """Improve a solution in place until an iteration gains less than `tol` nats."""
    v = solution.v
    active = np.flatnonzero(v)
    block, linear = quadratic.block(active, active), quadratic.linear[active]
    solution.objective.append(_objective(block, linear, noise, v[active], solution.tau))
    while solution.num_iterations < max_iter:
        solution.num_iterations += 1
        before = solution.objective[-1]
        active = np.flatnonzero(v)
        gradient = quadratic.product(active, v[active]) - solution.tau * quadratic.linear
        entering = _entering(v, gradient, len(active))
        here = (quadratic, noise, active, entering, v, gradient, solution.tau, before)
        step = _newton_step(*here, damping=0.0)
        if step is None:
            steps = [_newton_step(*here, damping=CONVEXIFYING), _coordinate_step(*here)]
            # The first is better at moving weights to and from zero, the second at large weights.
            step = min(filter(None, steps), key=lambda step: step[-1], default=None)
        if step is not None:
            _take(solution, step)
        if before - solution.objective[-1] < tol and (step is None or not len(entering)):
            escape = _escape(quadratic, noise, solution)
            if escape is None:
                solution.converged = True
                break
            _take(solution, escape)
    return solution


Step = tuple[Indices, Array, float, float]


def _take(solution: Solution, step: Step) -> None:
    chosen, values, solution.tau, objective = step
    solution.v[:] = 0
    solution.v[chosen] = values
    solution.objective.append(objective)


def _entering(v: Array, gradient: Array, num_active: int) -> Indices:
    """Zero weights whose gradient exceeds one standard error, the worst first if they are many.

    All at once they would explain the same residual many times over.
    """
    entering = np.flatnonzero((v == 0) & (np.abs(gradient) > 1 + ENTRY_MARGIN))
    limit = max(FEWEST_ENTRIES, num_active)
    if len(entering) > limit:
        worst = np.argpartition(-np.abs(gradient[entering]), limit)[:limit]
        entering = entering[worst]
    return entering


def _newton_step(
    quadratic: Quadratic,
    noise: NoiseTerm,
    active: Indices,
    entering: Indices,
    v: Array,
    gradient: Array,
    tau: float,
    objective: float,
    *,
    damping: float,
) -> Step | None:
    chosen = np.concatenate([active, entering])
    values, linear = v[chosen], quadratic.linear[chosen]
    # Within one orthant the penalty is smooth.
    sign = np.where(values != 0, np.sign(values), -np.sign(gradient[chosen]))
    penalty = dropout_penalty(values)
    slope = gradient[chosen] + sign * penalty.slope
    block = quadratic.block(chosen, chosen)
    hessian = block.copy()
    diagonal = np.diag_indices_from(hessian)
    hessian[diagonal] += penalty.curvature + damping
    direction = _direction(hessian, slope, linear, noise, values, sign, tau)
    if direction is None:
        return None
    move, tau_move = direction
    for halving in range(HALVINGS):
        length = 0.5**halving
        trial = values + length * move
        trial[trial * sign <= 0] = 0
        trial_tau = tau + length * tau_move
        if trial_tau <= 0:
            continue
        improved = _objective(block, linear, noise, trial, trial_tau)
        if improved < objective:
            return chosen, trial, trial_tau, improved
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


def _coordinate_step(
    quadratic: Quadratic,
    noise: NoiseTerm,
    active: Indices,
    entering: Indices,
    v: Array,
    gradient: Array,
    tau: float,
    objective: float,
) -> Step | None:
    """What cannot fail: one weight enters at its own optimum, else the talk's updates."""
    if len(entering):
        first = entering[np.argmax(np.abs(gradient[entering]))]
        chosen = np.append(active, first)
        block = quadratic.block(chosen, chosen)
        values = np.append(v[active], _best_alone(-float(gradient[first]), float(block[-1, -1])))
    else:
        chosen, block = active, quadratic.block(active, active)
        system = block + np.diag(dropout_penalty(v[active]).alpha)
        factor = cho_factor(system, lower=True, check_finite=False)
        values = cho_solve(factor, tau * quadratic.linear[active], check_finite=False)
    linear = quadratic.linear[chosen]
    if not noise.fixed:
        tau = noise.best_tau(float(linear @ values))
    improved = _objective(block, linear, noise, values, tau)
    return (chosen, values, tau, improved) if improved < objective else None


def _escape(quadratic: Quadratic, noise: NoiseTerm, solution: Solution) -> Step | None:
    """A way down from a saddle, if the solution is one: where equal features share a weight.

    Along the direction of negative curvature, to where the first weight becomes zero.
    """
    active = np.flatnonzero(solution.v)
    values, linear = solution.v[active], quadratic.linear[active]
    block = quadratic.block(active, active)
    hessian = block + np.diag(dropout_penalty(values).curvature)
    try:
        cho_factor(hessian, lower=True, check_finite=False)
        return None
    except LinAlgError:
        _, vectors = eigh(hessian, subset_by_index=[0, 0], check_finite=False)
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
        steps.append(
            (active, trial, solution.tau, _objective(block, linear, noise, trial, solution.tau))
        )
    step = min(steps, key=lambda step: step[-1], default=None)
    return step if step is not None and step[-1] < solution.objective[-1] else None


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


def _objective(block: Array, linear: Array, noise: NoiseTerm, values: Array, tau: float) -> float:
    fit = 0.5 * values @ block @ values - tau * (linear @ values)
    return float(noise.value(tau) + fit + dropout_penalty(values).value.sum())
