"""Truncated log-normal multipliers: log θ is normal, cut to an interval.

The posterior of structured Bayesian pruning, whose prior has log θ uniform on the same interval
(Neklyudov, Molchanov, Ashukha & Vetrov, 2017). Every function is elementwise over units:
`location` and `log_scale` belong to the normal before it was cut to [low, high].

Everything is computed in float64: units are few, and a truncated normal needs differences of tail
probabilities. `location` may lie up to 10⁴ standard deviations outside the interval: values stay
accurate there, and gradients have five digits at 10³ and one at 10⁴. A location that is farther out
is treated as if it were at 10⁴.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_INVERSE_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_FARTHEST = 1e4
_TAIL = 30.0  # From here on the tail of a normal is sampled by its expansion.


def kl(location: Tensor, log_scale: Tensor, low: float, high: float) -> Tensor:
    """KL to the log-uniform prior on the same interval: how much narrower the posterior is.

    With α, β the standardized ends and Z the mass between them,
    log(high − low) − log(√(2πe) · scale · Z) − (α φ(α) − β φ(β)) / (2 Z).
    """
    normal = _Cut(location, log_scale, low, high)
    log_mass_over_density, half_square = _log_mass(normal.far, normal.near)
    # Far outside the interval, half_square and the ends nearly cancel: no sums in between.
    near_density = (half_square - 0.5 * normal.near.square() - log_mass_over_density).exp()
    ends = near_density * (normal.far * normal.far_to_near() - normal.near) * _INVERSE_SQRT_2PI
    constant = math.log(high - low) - 0.5 * math.log(2 * math.pi * math.e)
    return constant - normal.log_scale - log_mass_over_density + (half_square - 0.5 * ends)


def log_mean(location: Tensor, log_scale: Tensor, low: float, high: float) -> Tensor:
    """log E θ."""
    normal = _Cut(location, log_scale, low, high)
    log_ratio = normal.log_mass(shift=1) - normal.log_mass()
    return (normal.location + 0.5 * normal.scale.square() + log_ratio).clamp(low, high)


def log_snr(location: Tensor, log_scale: Tensor, low: float, high: float) -> Tensor:
    """log(E θ / √Var θ). Where the ratio is far above 10³, the value says just that."""
    normal = _Cut(location, log_scale, low, high)
    # log(E θ² / (E θ)²) = log(1 + 1/SNR²)
    excess = normal.scale.square() + normal.log_mass(shift=2) + normal.log_mass()
    excess = excess - 2 * normal.log_mass(shift=1)
    return -0.5 * excess.clamp_min(torch.finfo(excess.dtype).eps).expm1().log()


def sample(location: Tensor, log_scale: Tensor, low: float, high: float, uniform: Tensor) -> Tensor:
    """Draw θ from uniform noise in [0, 1), through the inverse of its distribution function.

    Gradients with respect to location and scale are those of this map.
    """
    normal = _Cut(location, log_scale, low, high)
    tiny = torch.finfo(torch.float64).eps / 2
    uniform = uniform.double().clamp(tiny, 1 - tiny)
    # θ grows with the noise on both sides, so that held noise means the same on both.
    uniform = torch.where(normal.flipped, 1 - uniform, uniform)
    in_tail = normal.near < -_TAIL
    # In the far tail the density falls like exp(-z²/2) with a slowly varying factor.
    log_survival = torch.log(uniform + (1 - uniform) * normal.far_to_near())
    near = torch.where(in_tail, normal.near, -_TAIL)
    from_tail = -(near.square() - 2 * log_survival).sqrt()
    near = torch.where(in_tail, 0.0, normal.near)
    at_near, at_far = _normal_cdf(near), _normal_cdf(normal.far)
    from_bulk = torch.special.ndtri(at_far + uniform * (at_near - at_far))
    z = torch.where(in_tail, from_tail, from_bulk)
    log_theta = normal.location + normal.scale * torch.where(normal.flipped, -z, z)
    return log_theta.clamp(low, high).exp()


class _Cut:
    """A normal cut to an interval, turned so that its mass is on the left of zero.

    `near` and `far` are the standardized ends, the sign flipped where the upper tail would be
    asked for: far < near, |near| ≤ |far|. Differences of distribution functions are exact there.
    """

    def __init__(self, location: Tensor, log_scale: Tensor, low: float, high: float):
        # A scale far wider than the interval gives a uniform distribution whatever it is.
        self.log_scale = log_scale.double().clamp_max(math.log(high - low) + 4)
        self.scale = self.log_scale.clamp_min(-80.0).exp()
        margin = _FARTHEST * self.scale
        self.location = location.double().clamp(low - margin, high + margin)
        self.low = (low - self.location) / self.scale
        self.high = (high - self.location) / self.scale
        self.far, self.near, self.flipped = _turned(self.low, self.high)

    def far_to_near(self) -> Tensor:
        """φ(far) / φ(near)."""
        return (-0.5 * (self.far - self.near) * (self.far + self.near)).exp()

    def log_mass(self, shift: int = 0) -> Tensor:
        """log(Φ(high − shift · scale) − Φ(low − shift · scale))."""
        far, near = self.far, self.near
        if shift:
            far, near, _ = _turned(self.low - shift * self.scale, self.high - shift * self.scale)
        log_scaled, half_square = _log_mass(far, near)
        return log_scaled - half_square


def _normal_cdf(z: Tensor) -> Tensor:
    # torch's own, special.ndtr, is 0 below −8.3.
    return 0.5 * torch.erfc(-math.sqrt(0.5) * z)


def _turned(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flipped = low + high > 0
    return torch.where(flipped, -high, low), torch.where(flipped, -low, high), flipped


def _log_mass(far: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """log(Φ(near) − Φ(far)) as a difference: the second term is near²/2 on the left of zero."""
    root = math.sqrt(0.5)
    across = near > 0
    bulk = 0.5 * (torch.erf(root * near.clamp_min(0)) - torch.erf(root * far))
    left = near.clamp_max(0)
    ratio = (-0.5 * (far - left) * (far + left)).exp()
    tail = 0.5 * (torch.special.erfcx(-root * left) - torch.special.erfcx(-root * far) * ratio)
    # One logarithm of the branch that is taken: the other's would have NaN for a gradient.
    return torch.where(across, bulk, tail).log(), 0.5 * left.square()
