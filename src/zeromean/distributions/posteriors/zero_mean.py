"""Weights with mean zero: all they know is in their variances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    require_dtype,
)
from zeromean.distributions.noise import NoiseFamily, normal
from zeromean.distributions.posteriors.factorized import FactorizedPosterior, _log_magnitude
from zeromean.distributions.posteriors.posterior import WeightLayout
from zeromean.registry import register


@register("posterior")
class ZeroMean(FactorizedPosterior):
    """w = scale · ε: everything the weight knows is in its variance.

    `scale` is signed and starts uniformly in ±1/√fan_in; the standard deviation is its absolute
    value. Neklyudov et al. (2019), section 3.
    """

    has_mean = False

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        noise: NoiseFamily = normal,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout)
        require_dtype(dtype)
        self.scale = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.reset_parameters()

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[None, Tensor]:
        return None, self._look_up(self.scale, rows)

    def log_variance_per_weight(self) -> Tensor:
        return 2 * _log_magnitude(self.scale)

    def log_alpha_per_weight(self) -> Tensor:
        return torch.full_like(self.scale, math.inf)

    def clip_log_alpha_(self, low: float, high: float) -> None:
        """Nothing to do: α is infinite by definition."""

    def reset_parameters(self) -> None:
        self._initialize_like_torch_(self.scale)

    def set_weight_(self, weight: Tensor) -> None:
        """Take the magnitudes of a weight over as scales.

        A weight whose every number is zero says nothing, and scales of zero have no gradient that
        could change that: the layer starts like a new one.
        """
        with torch.no_grad():
            if weight.is_meta or weight.any():
                self.scale.copy_(weight.abs())
