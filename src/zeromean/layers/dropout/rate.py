"""Noise on units with a mean of one and a drop rate, fixed or learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from zeromean.arguments import require_choice, require_dtype
from zeromean.layers.dropout.unit_noise import UnitNoise


class RatedNoise(UnitNoise):
    """Multipliers of mean 1 and variance α = p / (1 − p): log α is what is learned of the rate p.

    A low signal-to-noise ratio says nothing here: a unit that is all noise can still carry
    everything in its variance.
    """

    prunable = False

    def __init__(
        self,
        num_features: int,
        p: float,
        share: Literal["layer", "unit"],
        learned: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        super().__init__(num_features, device)
        require_dtype(dtype)
        require_choice("share", share, ("layer", "unit"))
        self.p = p
        self.share = share
        shape = () if share == "layer" else (self.num_features,)
        log_alpha = torch.empty(shape, device=device, dtype=dtype)
        if learned:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)

    def mean(self) -> Tensor:
        return self.log_alpha.new_ones(self.num_features)

    def log_snr(self) -> Tensor:
        return -0.5 * self.log_alpha.expand(self.num_features)

    def kl_terms(self) -> dict[nn.Module, Callable[[], Tensor]]:
        return super().kl_terms() if isinstance(self.log_alpha, nn.Parameter) else {}

    @torch.no_grad()
    def clip_log_alpha_(self, low: float, high: float) -> None:
        if self.log_alpha.requires_grad:
            self.log_alpha.clamp_(low, high)

    def reset_parameters(self) -> None:
        self.keep.fill_(True)
        log_p = math.log(self.p) if self.p else -math.inf
        nn.init.constant_(self.log_alpha, log_p - math.log1p(-self.p))
