"""Noise of its own for every weight, next to its mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    require_dtype,
)
from zeromean.distributions.noise import NoiseFamily, normal
from zeromean.distributions.posteriors.factorized import FactorizedPosterior, _log_magnitude
from zeromean.distributions.posteriors.posterior import WeightLayout, _require_finite
from zeromean.distributions.posteriors.spread import (
    DrawWeight,
    Spread,
    can_draw_fast,
    fast_exp,
)
from zeromean.registry import register


@register("posterior")
class Additive(FactorizedPosterior):
    """w = mean + σ · ε with a mean and a log-variance for every weight.

    The gradient of the mean is free of the weight's own noise, which is what lets sparse
    variational dropout learn large α. Molchanov et al. (2017).

    Args:
        log_variance: Initial log σ², the same for every weight. Default: −10.
        log_alpha: Initial log(σ² / mean²) in its place: noise relative to each weight, so that
            layers with large and small weights get as much of it.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        log_variance: float | None = None,
        log_alpha: float | None = None,
        noise: NoiseFamily = normal,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout)
        require_dtype(dtype)
        if log_variance is not None and log_alpha is not None:
            raise ValueError(
                "The initial noise is either log_variance, the same for every weight, or "
                f"log_alpha, relative to each; got {log_variance} and {log_alpha}."
            )
        self.initial_log_alpha = (
            None if log_alpha is None else _require_finite("log_alpha", log_alpha)
        )
        self.initial_log_variance = _require_finite(
            "log_variance", -10.0 if log_variance is None else log_variance
        )
        self.mean = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.log_variance = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.reset_parameters()

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.mean_weight(rows), fast_exp(self._look_up(self.log_variance, rows), 0.5)

    def mean_weight(self, rows: Tensor | None = None) -> Tensor:
        return self._look_up(self.mean, rows)

    def mean_and_spread(self) -> tuple[Tensor | None, Tensor, Spread]:
        if self.layout.noiseless_row is not None:
            return super().mean_and_spread()
        return self.mean_weight(), self.log_variance_per_weight(), Spread.LOG_VARIANCE

    def moments(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # Straight from the logarithm: exp and square would be two more passes over the weights.
        variance = Spread.LOG_VARIANCE.variance(self._look_up(self.log_variance, rows))
        return self.mean_weight(rows), self.silenced(variance, rows)

    def sample(self) -> Tensor:
        if self.mask is not None or self.layout.noiseless_row is not None or not can_draw_fast():
            return super().sample()
        noise = self.noise(self.log_variance.detach())
        return DrawWeight.apply(self.mean, self.log_variance, noise)

    def log_variance_per_weight(self) -> Tensor:
        return self.log_variance

    def log_alpha_per_weight(self) -> Tensor:
        log_alpha = self.log_variance - 2 * _log_magnitude(self.mean)
        return log_alpha

    @torch.no_grad()
    def clip_log_alpha_(self, low: float, high: float) -> None:
        if self.log_variance.requires_grad:
            log_alpha = self.log_alpha_per_weight()
            # Pruned weights have no α to move.
            self.log_variance.add_(self.masked(log_alpha.clamp(low, high) - log_alpha))

    def reset_parameters(self) -> None:
        self._initialize_like_torch_(self.mean)
        self._reset_noise_()

    def set_weight_(self, weight: Tensor) -> None:
        with torch.no_grad():
            self.mean.copy_(weight)
        if self.initial_log_alpha is not None:
            self._reset_noise_()

    @torch.no_grad()
    def _reset_noise_(self) -> None:
        if self.initial_log_alpha is None:
            nn.init.constant_(self.log_variance, self.initial_log_variance)
            return
        magnitude = self.mean.to(torch.promote_types(self.dtype, torch.float32)).abs()
        typical = magnitude.square().mean().sqrt()
        typical = torch.where(typical > 0, typical, self.initial_bound)
        # A weight near zero gets a little noise too: without any it would hardly learn how much.
        magnitude = magnitude.maximum(0.01 * typical)
        self.log_variance.copy_(2 * magnitude.log() + self.initial_log_alpha)
