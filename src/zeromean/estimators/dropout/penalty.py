"""What a weight costs under variational dropout once its α is at its one-dimensional optimum.

A weight w with posterior N(w, α w²) and curvature H of the data term costs ½ H α w² + KL(α). In
units of its standard error, v = w √H, the smallest such cost is a function of v alone,

    P(v) = min over α of ½ α v² + KL(α),

and everything about it is explicit in z = 1 / √(2 α): with Dawson's function D, whose integral is
half the KL, the optimum is where v² = 4 z³ D(z), and there P = z D(z) + KL.

P(v) = |v| + O(v²) at 0, so that weights whose gradient is below one standard error are *exactly*
zero, as with the lasso; P grows like log |v|, so that large weights are not shrunk, as with ARD. It
is concave in |v|, but barely: P'' > -0.222.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.special import dawsn

from zeromean.estimators.array_types import Array
from zeromean.functional._dawson import SCALE, VALUE

# The curvature at 0, and what must be added to it to be positive everywhere.
CURVATURE_AT_ZERO = -1 / 6
CONVEXIFYING = 0.25
# Below it, the first term of the series is exact: P = |v|, α = 1 / |v|.
SMALLEST = 1e-30
# A rational approximation of 2 z² / |v|, to start from: within 3.3%, and right at both ends.
NUMERATOR = (0.156013, -0.170457, 0.069024, 1.0)
DENOMINATOR = (0.156013, -0.283909, 1.0)
# From here on, z is proportional to |v|.
LARGE = 1e3
KL_COEFFICIENTS = np.array(VALUE[torch.float64])


class Penalty(NamedTuple):
    """The penalty of each weight, its derivatives in |v|, and the α that attains it."""

    value: Array
    slope: Array
    curvature: Array
    alpha: Array


def dropout_penalty(v: Array) -> Penalty:
    """P(v), with its one-sided derivatives at 0, where α is infinite."""
    size = np.abs(v)
    live = size > SMALLEST
    value, slope = size.copy(), np.ones_like(size)
    curvature, alpha = np.full_like(size, CURVATURE_AT_ZERO), np.full_like(size, np.inf)
    z = _solve_z(size[live])
    dawson = dawsn(z)
    value[live] = z * dawson + kl_divergence(z)
    alpha[live] = 0.5 / z**2
    slope[live] = alpha[live] * size[live]
    curvature[live] = alpha[live] * (1 - 2 / _elasticity(z, dawson))
    return Penalty(value, slope, curvature, alpha)


def kl_divergence(z: Array) -> Array:
    """The exact KL to the log-uniform prior at z = 1 / √(2 α), as `log_uniform_kl` has it.

    For so few numbers, torch would spend more on its calls than on the arithmetic.
    """
    x = 2 * z**2
    y = x / (x + SCALE)
    # In one product: Horner's scheme would be two calls for each of so many coefficients.
    polynomial = np.vander(y - 0.5, len(KL_COEFFICIENTS)) @ KL_COEFFICIENTS
    return 0.5 * np.log1p(x / SCALE) + y * polynomial


def _solve_z(size: Array) -> Array:
    """Solve v² = 4 z³ D(z) by Newton's method in logarithms, in which it is nearly straight."""
    v = np.minimum(size, LARGE)
    z = np.sqrt(0.5 * v * np.polyval(NUMERATOR, v) / np.polyval(DENOMINATOR, v)) * (size / v)
    log_target = 2 * np.log(size / 2)
    for _ in range(12):
        dawson = dawsn(z)
        step = (3 * np.log(z) + np.log(dawson) - log_target) / (2 * _elasticity(z, dawson))
        z = z * np.exp(-step)
        # The error after a step is of the order of its square.
        if np.max(np.abs(step), initial=0.0) < 1e-8:
            break
    return z


def _elasticity(z: Array, dawson: Array) -> Array:
    """d log v / d log z, which falls from 2 at 0 to 1 at infinity."""
    log_slope = z * (1 - 2 * z * dawson) / dawson
    large = z > LARGE
    if large.any():  # There 1 - 2 z D(z) cancels.
        log_slope[large] = -1 - 1 / z[large] ** 2
    return 1.5 + 0.5 * log_slope
