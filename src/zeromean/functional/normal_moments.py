"""Moments of what is piecewise linear in normal variables: rectified, clipped, the larger of two.

With z = mean / std, Φ and φ the normal distribution function and density, and
r(z) = E max(z + ε, 0) = zΦ(z) + φ(z), everything here is made of Φ, φ and r. The variances are
written as `Φ − r(z)·r(−z)`, with r(−z) = r(z) − z, which loses no digits where z is large: the
usual difference of a second moment and a squared mean does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.functional.numerics import can_branch, smallest_normal

_DENSITY_AT_ZERO = 1 / math.sqrt(2 * math.pi)
# Beyond, Φ is 0 or 1 in double precision too.
_FAR = 13.0
_HALF_LOG2_E = 0.5 * math.log2(math.e)
# No z is the negative of it, so that nothing is divided by zero.
_OFF_ZERO = 1.2345e-20
# Pieces of this size, with what is computed from them, stay in a core's second-level cache, and are
# small enough for memory that is not given back to the system.
_CHUNK = 2**15

Moments = tuple[Tensor, Tensor]


def rectified(mean: Tensor, variance: Tensor) -> Moments:
    """Mean and variance of max(x, 0) for a normal x."""
    return _by_chunks(_rectified, mean, variance)


def leaky_rectified(mean: Tensor, variance: Tensor, slope: float | Tensor) -> Moments:
    """Mean and variance of x where it is positive, and of slope · x elsewhere, for a normal x."""
    return _by_chunks(lambda m, v: _leaky_rectified(m, v, slope), mean, variance)


def clipped(mean: Tensor, variance: Tensor, low: float, high: float) -> Moments:
    """Mean and variance of a normal x that is cut to [low, high]; either may be infinite."""
    return _by_chunks(lambda m, v: _clipped(m, v, low, high), mean, variance)


def maximum(mean: Tensor, variance: Tensor, other: Tensor, other_variance: Tensor) -> Moments:
    """Mean and variance of the larger of two independent normal variables. Clark (1961)."""
    return _by_chunks(_maximum, mean, variance, other, other_variance)


def normal_cdf(z: Tensor) -> Tensor:
    """Φ(z)."""
    return 0.5 + 0.5 * (z * math.sqrt(0.5)).erf()


def _rectified(mean: Tensor, variance: Tensor) -> Moments:
    std, z = _standardized(mean, variance)
    cdf, density = _cdf_and_density(z)
    excess = torch.addcmul(density, z, cdf)
    squared = torch.addcmul(cdf, excess, excess - z, value=-1)
    return torch.addcmul(mean * cdf, std, density), variance * squared.clamp_min(0)


def _leaky_rectified(mean: Tensor, variance: Tensor, slope: float | Tensor) -> Moments:
    std, z = _standardized(mean, variance)
    cdf, density = _cdf_and_density(z)
    excess = torch.addcmul(density, z, cdf)
    squared = torch.addcmul(cdf, excess, excess - z, value=-1).clamp_min(0)
    # x = slope · x + (1 − slope) · max(x, 0), whose covariance is Φ times the variance (Stein).
    rest = 1 - slope
    ratio = slope**2 + rest**2 * squared + 2 * slope * rest * cdf
    rectified_mean = torch.addcmul(mean * cdf, std, density)
    return slope * mean + rest * rectified_mean, variance * ratio


def _clipped(mean: Tensor, variance: Tensor, low: float, high: float) -> Moments:
    """cut(x) = low + max(x − low, 0) − max(x − high, 0)."""
    if high == math.inf:
        shifted, cut = _rectified(mean - low, variance)
        return shifted + low, cut
    if low == -math.inf:
        shifted, cut = _rectified(high - mean, variance)
        return high - shifted, cut
    std, z = _standardized(mean - low, variance)
    _, above_z = _standardized(mean - high, variance)
    cdf, density = _cdf_and_density(z)
    above_cdf, above_density = _cdf_and_density(above_z)
    excess = torch.addcmul(density, z, cdf)
    above = torch.addcmul(above_density, above_z, above_cdf)
    # In units of std: how far the cut mean is below `high`.
    missing = (above - above_z) - (excess - z)
    ratio = (cdf - excess * (excess - z)) - (above_cdf - above * (above - above_z))
    between = torch.addcmul(mean * (cdf - above_cdf), std, density - above_density)
    cut_mean = between + low * (1 - cdf) + high * above_cdf
    return cut_mean, variance * (ratio - 2 * above * missing).clamp_min(0)


def _maximum(mean: Tensor, variance: Tensor, other: Tensor, other_variance: Tensor) -> Moments:
    gap, together = mean - other, variance + other_variance
    std, z = _standardized(gap, together)
    cdf, density = _cdf_and_density(z)
    excess = torch.addcmul(density, z, cdf)
    larger = torch.addcmul(torch.addcmul(other, gap, cdf), std, density)
    spread = torch.addcmul(other_variance, variance - other_variance, cdf)
    spread = torch.addcmul(spread, together * excess, excess - z, value=-1)
    return larger, spread.clamp_min(0)


def _standardized(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """std, and mean / std, which is large but finite where there is no variance."""
    std = variance.clamp_min(smallest_normal(variance.dtype) or 1e-7).sqrt()
    z = mean / std
    # So far out, gradients are differences of huge numbers; a bound lets none through.
    return std, z.clamp(-_FAR, _FAR) if torch.is_grad_enabled() else z


def _cdf_and_density(z: Tensor) -> tuple[Tensor, Tensor]:
    density = (z.square() * -_HALF_LOG2_E).exp2() * _DENSITY_AT_ZERO
    if torch.is_grad_enabled() or not can_branch():
        return normal_cdf(z), density
    # GELU is zΦ(z). Its kernel and that of exp2 take a third and a quarter of the time of those of
    # the error function and exp.
    z = z + _OFF_ZERO
    return F.gelu(z) / z, density


def _by_chunks(function: Callable[..., Moments], *tensors: Tensor) -> Moments:
    """An element-wise function of tensors of one shape, in pieces that fit the cache."""
    first = tensors[0]
    whole = torch.is_grad_enabled() or not can_branch() or first.numel() < 2 * _CHUNK
    if whole or first.device.type != "cpu" or len(first) < 2:
        return function(*tensors)
    rows = max(1, _CHUNK * len(first) // first.numel())
    mean, variance = torch.empty_like(first), torch.empty_like(first)
    parts = (tensor.split(rows) for tensor in (mean, variance, *tensors))
    for out_mean, out_variance, *part in zip(*parts, strict=True):
        new_mean, new_variance = function(*part)
        out_mean.copy_(new_mean)
        out_variance.copy_(new_variance)
    return mean, variance
