"""Log-normal noise on units, which takes whole neurons and filters away."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zeromean import functional
from zeromean.arguments import (
    require_dtype,
    require_numbers,
)
from zeromean.functional import log_normal
from zeromean.layers.dropout.unit_noise import UnitNoise


class LogNormalDropout(UnitNoise):
    """Log-normal multipliers between e^low and e^high, for structured sparsity.

    log θ is normal with mean `location` and standard deviation exp(`log_scale`), cut to
    [low, high]; the prior of log θ is uniform there. Units that the network can do without become
    nothing but noise; `prune_` drops those whose signal-to-noise ratio is below 1. Put it behind a
    layer, before or after its BatchNorm and activation. Neklyudov et al. (2017).

    Args:
        num_features: Number of units: C of an input `(N, C, *)`.
        low: Logarithm of the smallest multiplier.
        high: Logarithm of the largest multiplier.
        location: Initial mean of log θ.
        log_scale: Initial logarithm of the standard deviation of log θ.
        kl_weight: Weight of its KL term. More than 1 says that units of this layer cost more than
            their nats, as filters do, which run at many positions.
    """

    prunable = True

    def __init__(
        self,
        num_features: int,
        *,
        low: float = -20.0,
        high: float = 0.0,
        location: float = 0.0,
        log_scale: float = -5.0,
        kl_weight: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(num_features, device)
        require_dtype(dtype)
        require_numbers(
            low=low, high=high, location=location, log_scale=log_scale, kl_weight=kl_weight
        )
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"low must be less than high, got low={low}, high={high}.")
        if not (math.isfinite(location) and math.isfinite(log_scale)):
            raise ValueError(
                "location and log_scale must be finite, got "
                f"location={location}, log_scale={log_scale}."
            )
        if not 0 <= kl_weight < math.inf:
            raise ValueError(f"kl_weight must be at least 0 and finite, got {kl_weight}.")
        self.low, self.high = low, high
        self.kl_weight = kl_weight
        self.initial_location, self.initial_log_scale = location, log_scale
        self.location = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))
        self.log_scale = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))
        self.reset_parameters()

    def draw_noise(self, num_objects: int = 1) -> Tensor:
        shape = (num_objects, self.num_features)
        return torch.rand(shape, dtype=torch.float64, device=self.location.device)

    def multipliers(self, noise: Tensor) -> Tensor:
        theta = log_normal.sample(self.location, self.log_scale, self.low, self.high, noise)
        return theta.to(self.location.dtype)

    def mean(self) -> Tensor:
        log_mean = log_normal.log_mean(self.location, self.log_scale, self.low, self.high)
        return log_mean.exp().to(self.location.dtype)

    def log_snr(self) -> Tensor:
        log_snr = log_normal.log_snr(self.location, self.log_scale, self.low, self.high)
        return log_snr.to(self.location.dtype)

    def kl_per_unit(self) -> Tensor:
        kl = log_normal.kl(self.location, self.log_scale, self.low, self.high)
        return kl.to(functional.wide(self.location).dtype)

    def clip_log_alpha_(self, low: float, high: float) -> None:
        """Nothing to do: these multipliers have no α."""

    def reset_parameters(self) -> None:
        self.keep.fill_(True)
        nn.init.constant_(self.location, self.initial_location)
        nn.init.constant_(self.log_scale, self.initial_log_scale)

    def extra_repr(self) -> str:
        kept = int(self.keep.sum()) if not self.keep.is_meta else self.num_features
        left = "" if kept == self.num_features else f", {kept} left"
        weight = "" if self.kl_weight == 1 else f", kl_weight={self.kl_weight:g}"
        return (
            f"{self.num_features}, low={self.low:g}, high={self.high:g}, "
            f"location={self.initial_location:g}, log_scale={self.initial_log_scale:g}"
            f"{weight}{left}"
        )
