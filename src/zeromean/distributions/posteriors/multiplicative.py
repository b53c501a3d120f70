"""Noise that is proportional to the weight, with α by layer, neuron or weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    require_choice,
    require_dtype,
)
from zeromean.distributions.noise import NoiseFamily, normal
from zeromean.distributions.posteriors.factorized import FactorizedPosterior, _log_magnitude
from zeromean.distributions.posteriors.posterior import SHARES, WeightLayout, _require_finite
from zeromean.registry import register


@register("posterior")
class Multiplicative(FactorizedPosterior):
    """w = mean · (1 + √α · ε): Gaussian dropout with a learned α. Kingma et al. (2015).

    Args:
        share: One α for each "layer", "neuron" (output unit, filter or embedding column) or
            "weight".
        log_alpha: Initial log α.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        share: Literal["layer", "neuron", "weight"] = "layer",
        log_alpha: float = -5.0,
        noise: NoiseFamily = normal,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout)
        require_dtype(dtype)
        require_choice("share", share, SHARES)
        self.share = share
        self.initial_log_alpha = _require_finite("log_alpha", log_alpha)
        num_neurons = self.shape[layout.neuron_dim] * layout.groups
        alpha_shape = {"layer": (), "neuron": (num_neurons,), "weight": self.shape}[share]
        self.mean = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.log_alpha = nn.Parameter(torch.empty(alpha_shape, device=device, dtype=dtype))
        self.reset_parameters()

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean = self.mean_weight(rows)
        if rows is None:
            log_alpha = self._broadcastable_log_alpha()
        else:  # Neurons are columns then.
            log_alpha = self.log_alpha
            log_alpha = self._look_up(log_alpha, rows) if self.share == "weight" else log_alpha
        return mean, mean * (0.5 * log_alpha).exp()

    def mean_weight(self, rows: Tensor | None = None) -> Tensor:
        return self._look_up(self.mean, rows)

    def log_variance_per_weight(self) -> Tensor:
        log_variance = 2 * _log_magnitude(self.mean) + self._broadcastable_log_alpha()
        return log_variance

    def log_alpha_per_weight(self) -> Tensor:
        return self._broadcastable_log_alpha().expand(self.shape)

    @torch.no_grad()
    def clip_log_alpha_(self, low: float, high: float) -> None:
        if self.log_alpha.requires_grad:
            self.log_alpha.clamp_(low, high)

    def settings(self) -> dict[str, Any]:
        return {"share": self.share}

    @property
    def weights_per_alpha(self) -> int:
        """How many random weights share one α."""
        return self.num_random // self.log_alpha.numel()

    def reset_parameters(self) -> None:
        self._initialize_like_torch_(self.mean)
        nn.init.constant_(self.log_alpha, self.initial_log_alpha)

    def set_weight_(self, weight: Tensor) -> None:
        with torch.no_grad():
            self.mean.copy_(weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, share={self.share!r}"

    def _broadcastable_log_alpha(self) -> Tensor:
        """log α in a shape that broadcasts against the weight."""
        if self.share != "neuron":
            return self.log_alpha
        trailing = [1] * (self.dim() - 1 - self.layout.neuron_dim)
        if self.layout.neuron_dim == 0:
            return self.log_alpha.view(-1, *trailing)
        # Output units lie along dimension 1; the block of dimension 0 says which of them.
        blocks = self.log_alpha.view(self.layout.groups, self.shape[1], *trailing)
        if self.layout.groups == 1:
            return blocks
        return blocks.repeat_interleave(self.shape[0] // self.layout.groups, dim=0)
