"""Newton's method in weights, variances and intercept together, for features that stay.

The bound is not concave: steps are held back, as by Levenberg and Marquardt, in parts of the
curvature in each direction, where the plain one leads nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh
from scipy.special import dawsn

from zeromean.estimators.array_types import Array
from zeromean.estimators.dropout.posterior import DropoutPosterior
from zeromean.estimators.likelihoods.logistic import DataTerm, Slopes

# In parts of the largest, where the bound has no optimum for Newton's step to go to.
SMALLEST_CURVATURE = 1e-8
# What is added to curvatures, in parts of them.
HOLDS = (0.0, *(4.0**power for power in range(-6, 3)))
# Nats that a held step must promise, near a saddle, for it to be worth a trial.
LEAST_PROMISE = 1e-4


@dataclass(frozen=True)
class JointStep:
    posterior: DropoutPosterior
    left_over: bool  # whether weights would have passed through zero


@dataclass(frozen=True)
class JointModel:
    """The bound to second order in weights, intercept and log standard deviations."""

    slope: Array
    curvature: Array  # the negative Hessian

    @classmethod
    def about(cls, term: DataTerm, posterior: DropoutPosterior, at: Slopes) -> JointModel | None:
        """None where derivatives are not finite."""
        joint = term.joint_curvatures(posterior)
        mean, size = posterior.mean, len(posterior.features)
        variance = posterior.std**2
        z = np.abs(mean) / (np.sqrt(2) * posterior.std)
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
        if not term.fit_intercept:
            slope[size] = 0
            hessian[size] = hessian[:, size] = 0
            hessian[size, size] = -1
        return cls(slope, -hessian) if np.isfinite(hessian).all() else None

    def step(self, posterior: DropoutPosterior, hold: float) -> JointStep | None:
        """None where the held model has no optimum either."""
        move = self._move(hold)
        if move is None:
            return None
        size, mean = len(posterior.features), posterior.mean
        trial = mean + move[:size]
        # It is not for this step to take weights through zero.
        passing = trial * mean <= 0
        trial = np.where(passing, 0.1 * mean, trial)
        std = posterior.std * np.exp(np.clip(move[size + 1 :], -2, 2))
        intercept = posterior.intercept + float(move[size])
        return JointStep(
            DropoutPosterior(posterior.features, trial, std, intercept), bool(passing.any())
        )

    def _move(self, hold: float) -> Array | None:
        held = self.curvature.copy()
        diagonal = np.abs(held.diagonal())
        held.flat[:: len(held) + 1] += hold * np.maximum(
            diagonal, SMALLEST_CURVATURE * diagonal.max()
        )
        try:
            factor = cho_factor(held, lower=True, check_finite=False)
        except LinAlgError:
            return None
        move = cho_solve(factor, self.slope, check_finite=False)
        if hold and 0.5 * float(move @ self.slope) < LEAST_PROMISE:
            # A saddle: away from it where the bound curves upwards, as fast as towards an optimum.
            values, vectors = eigh(self.curvature, check_finite=False)
            sizes = np.maximum(np.abs(values), SMALLEST_CURVATURE * np.abs(values).max())
            move = vectors @ ((vectors.T @ self.slope) / sizes)
        return move
