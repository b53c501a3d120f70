"""Weights that are positive: exponential and Gamma distributions.

State-dict keys are `log_mean`, and `log_alpha` of Gamma. A weight is its mean times a positive
multiplier of mean 1, whose variance is α.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeromean.arguments import require_dtype
from zeromean.distributions.noise import NoiseFamily, uniform
from zeromean.distributions.posteriors.factorized import FactorizedPosterior, _log_magnitude
from zeromean.distributions.posteriors.posterior import WeightLayout, _require_finite
from zeromean.functional.gamma import gamma_quantile
from zeromean.functional.numerics import wide
from zeromean.registry import register


class PositivePosterior(FactorizedPosterior):
    """Independent positive weights with means of their own.

    The noise is uniform, and tells which quantile of its distribution a weight is, so that held
    noise and files need nothing of their own. Means start near 1 / fan_in: outputs are about
    averages of inputs. A row without noise (`padding_idx`) is zero.
    """

    symmetric = False
    positive = True

    def __init__(
        self,
        shape: Sequence[int] | None,
        noise: NoiseFamily,
        layout: WeightLayout,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        super().__init__(shape, noise, layout)
        require_dtype(dtype)
        if noise is not uniform:
            raise ValueError(
                f"{type(self).__name__} needs uniform noise, from which it makes its own, got "
                f"{noise.__name__}; leave noise= out."
            )
        self.log_mean = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))

    # What it must answer.

    def _log_alpha(self, rows: Tensor | None = None) -> Tensor:
        """log α in a shape that broadcasts against the weight, pruned or not."""
        raise NotImplementedError

    def _draw_multiplier(self) -> Tensor:
        """Draw a multiplier for every weight."""
        raise NotImplementedError

    def _quantile(self, probability: Tensor) -> Tensor:
        """The multipliers that are larger than so large a part of all."""
        raise NotImplementedError

    # What follows from it.

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean = self.silenced(self._look_up(self.log_mean, rows).exp(), rows)
        return mean, mean * (0.5 * self._log_alpha(rows)).exp()

    def log_variance_per_weight(self) -> Tensor:
        return 2 * self.log_mean + self._log_alpha()

    def log_alpha_per_weight(self) -> Tensor:
        return self._log_alpha().expand(self.shape)

    def sample(self) -> Tensor:
        return self.mean_and_scale()[0] * self._draw_multiplier()

    def forward(self, noise: Tensor) -> Tensor:
        # Uniform noise of unit variance lies between ±√3. Rounding must not reach the ends.
        probability = 0.5 + wide(noise) / (2 * math.sqrt(3))
        smallest = torch.finfo(probability.dtype).eps / 2
        multiplier = self._quantile(probability.clamp(smallest, 1 - smallest))
        return self.mean_and_scale()[0] * multiplier.to(self.dtype)

    def reset_parameters(self) -> None:
        average = self.initial_bound**2 or 1.0
        with torch.no_grad():
            self.log_mean.uniform_(0.5, 1.5).mul_(average).log_()

    def set_weight_(self, weight: Tensor) -> None:
        """Take the magnitudes of a weight over as means."""
        with torch.no_grad():
            self.log_mean.copy_(_log_magnitude(weight))


@register("posterior")
class Exponential(PositivePosterior):
    """w = −mean · log ε with ε uniform on (0, 1): exponential weights.

    Each is as uncertain as it is large (α = 1), and the KL to `zm.GammaPrior` is exact. Weights are
    drawn (`zm.weight`), or outputs with their first two moments (`zm.moment_matched`).
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        noise: NoiseFamily = uniform,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout, device, dtype)
        self.reset_parameters()

    def clip_log_alpha_(self, low: float, high: float) -> None:
        """Nothing to do: α is 1."""

    def _log_alpha(self, rows: Tensor | None = None) -> Tensor:
        return self.log_mean.new_zeros(())

    def _draw_multiplier(self) -> Tensor:
        return -torch.log1p(-torch.rand_like(self.log_mean))

    def _quantile(self, probability: Tensor) -> Tensor:
        return -torch.log1p(-probability)


@register("posterior")
class Gamma(PositivePosterior):
    """Gamma weights, w = scale · ε with ε ~ Gamma(concentration, 1), both learned.

    The parameters are the mean, concentration · scale, and α = 1 / concentration, which says how
    much noise there is as it does elsewhere. The concentration is reparameterized implicitly
    (Figurnov, Mohamed & Mnih, 2018), and the KL to `zm.GammaPrior` is exact. Weights are drawn
    (`zm.weight`), or outputs with their first two moments (`zm.moment_matched`).

    Args:
        log_alpha: Initial log α, minus the log of the concentration. `posterior.log_alpha.
            requires_grad_(False)` keeps it, and only the scale is learned.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        log_alpha: float = -2.0,
        noise: NoiseFamily = uniform,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout, device, dtype)
        self.initial_log_alpha = _require_finite("log_alpha", log_alpha)
        self.log_alpha = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def concentration(self) -> Tensor:
        return (-self.log_alpha).exp()

    @torch.no_grad()
    def clip_log_alpha_(self, low: float, high: float) -> None:
        if self.log_alpha.requires_grad:
            self.log_alpha.clamp_(low, high)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.log_alpha, self.initial_log_alpha)

    def _log_alpha(self, rows: Tensor | None = None) -> Tensor:
        return self._look_up(self.log_alpha, rows)

    def _draw_multiplier(self) -> Tensor:
        concentration = wide(self.concentration)
        drawn = torch._standard_gamma(concentration) / concentration  # pyright: ignore
        return drawn.to(self.dtype)

    def _quantile(self, probability: Tensor) -> Tensor:
        return gamma_quantile(probability, wide(self.log_alpha))
