"""Weights that are there or not: binary noise on every weight, at a fixed rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.arguments import require_dtype, require_numbers
from zeromean.distributions.noise import NoiseFamily, uniform
from zeromean.distributions.posteriors.factorized import FactorizedPosterior, _log_magnitude
from zeromean.distributions.posteriors.posterior import WeightLayout
from zeromean.registry import register


@register("posterior")
class DropConnect(FactorizedPosterior):
    """w is 0 at rate p, and mean / (1 − p) otherwise. Wan et al. (2013).

    The noise is uniform, and a weight is there where it is above a threshold, so that held noise
    and files need nothing of their own. It has no KL term: that of its weights to a normal prior
    is, up to a constant, an L2 penalty (`zm.functional.binary_dropout_kl`, weight decay).

    Args:
        p: Drop rate, in [0, 1).
    """

    symmetric = False

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        p: float = 0.5,
        noise: NoiseFamily = uniform,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout)
        require_dtype(dtype)
        require_numbers(p=p)
        if not 0 <= p < 1:
            raise ValueError(
                f"p must lie in [0, 1), got {p}; it is the rate at which weights drop."
            )
        if noise is not uniform:
            raise ValueError(
                f"DropConnect makes its binary noise from uniform noise, got {noise.__name__}; "
                "leave noise= out."
            )
        self.p = float(p)
        self.mean = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.reset_parameters()

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean = self.mean_weight(rows)
        return mean, mean * math.sqrt(self.p / (1 - self.p))

    def mean_weight(self, rows: Tensor | None = None) -> Tensor:
        return self._look_up(self.mean, rows)

    def log_variance_per_weight(self) -> Tensor:
        return 2 * _log_magnitude(self.mean) + self._log_alpha

    def log_alpha_per_weight(self) -> Tensor:
        return torch.full_like(self.mean, self._log_alpha)

    def clip_log_alpha_(self, low: float, high: float) -> None:
        """Nothing to do: the rate is fixed."""

    def sample(self) -> Tensor:
        return self(self.draw_noise())

    def forward(self, noise: Tensor) -> Tensor:
        # Uniform noise of unit variance lies between ±√3.
        kept = noise >= math.sqrt(3) * (2 * self.p - 1)
        # Not mean + scale · ε: what is dropped is exactly zero.
        deviation = kept.to(self.dtype) / (1 - self.p) - 1
        return self.mean_weight() * (1 + self.silenced(deviation))

    def settings(self) -> dict[str, Any]:
        return {"p": self.p}

    def reset_parameters(self) -> None:
        self._initialize_like_torch_(self.mean)

    def set_weight_(self, weight: Tensor) -> None:
        with torch.no_grad():
            self.mean.copy_(weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p:g}"

    @property
    def _log_alpha(self) -> float:
        return math.log(self.p) - math.log1p(-self.p) if self.p else -math.inf
