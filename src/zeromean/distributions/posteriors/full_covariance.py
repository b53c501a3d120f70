"""Weights that depend on each other: a normal with a full covariance, for small layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeromean.arguments import require_numbers
from zeromean.distributions.noise import NoiseFamily, normal
from zeromean.distributions.posteriors.posterior import Posterior, WeightLayout
from zeromean.registry import register

# Its factor has the square of this many numbers: 64 MB in single precision.
MOST_WEIGHTS = 4096


@register("posterior")
class FullCovariance(Posterior):
    """w ~ N(mean, L Lᵀ) over all weights of a layer together, with L lower triangular.

    Draws and the KL to `zm.Normal` are exact. Weights are drawn once for a batch (`zm.weight`), or
    for each example (`zm.local`): its outputs depend on each other as the weights do.

    Args:
        shape: Shape of the weight tensor, of at most 4,096 weights.
        log_variance: Initial log-variance of every weight; they start independent.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        log_variance: float = -10.0,
        noise: NoiseFamily = normal,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout)
        require_numbers(log_variance=log_variance)
        if noise is not normal:
            raise ValueError(
                f"FullCovariance needs normal noise, got {noise.__name__}; use zm.Additive."
            )
        if layout.noiseless_row is not None:
            raise ValueError(
                "padding_idx needs a row without noise; FullCovariance has none, use zm.Additive."
            )
        if self.numel() > MOST_WEIGHTS:
            raise ValueError(
                f"FullCovariance is for layers of at most {MOST_WEIGHTS} weights, got "
                f"{tuple(self.shape)}, which are {self.numel()}; use zm.Additive."
            )
        self.initial_log_variance = float(log_variance)
        size = self.numel()
        self.mean = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.log_diagonal = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.below = nn.Parameter(torch.empty(size, size, device=device, dtype=dtype))
        self.reset_parameters()

    def factor(self) -> Tensor:
        """L, with zero rows for pruned weights."""
        factor = self.below.tril(-1) + self.log_diagonal.exp().diag()
        return factor if self.mask is None else factor * self.mask.view(-1, 1)

    def columns(self) -> Tensor:
        """The columns of L in the shape of the weight, `(weights, *shape)`."""
        return self.factor().mT.reshape(-1, *self.shape)

    def own_variance(self) -> None:
        """No weight has noise that is not in the columns."""

    def covariance(self) -> Tensor:
        """The covariance of the flattened weight."""
        factor = self.factor()
        return factor @ factor.mT

    def moments(self, rows: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        variance = self.factor().square().sum(1).view(self.shape)
        return self.mean_weight(rows), variance if rows is None else variance[rows]

    def mean_weight(self, rows: Tensor | None = None) -> Tensor | None:
        return self.masked(self.mean if rows is None else self.mean[rows], rows)

    def draw_noise(self) -> Tensor:
        return self.noise(self.mean.detach())

    def forward(self, noise: Tensor) -> Tensor:
        flat = noise.flatten(noise.dim() - len(self.shape)) @ self.factor().mT
        return self.masked(self.mean) + flat.view(noise.shape)

    def deviation(self) -> Tensor:
        """Draw one weight tensor less its mean."""
        return (self.factor() @ self.draw_noise().flatten()).view(self.shape)

    def log_determinant(self) -> Tensor:
        if self.mask is None:
            return 2 * self.log_diagonal.sum()
        kept = self.factor()[self.mask.flatten()]
        return torch.linalg.slogdet(kept @ kept.mT).logabsdet

    def reset_parameters(self) -> None:
        self._initialize_like_torch_(self.mean)
        nn.init.zeros_(self.below)
        nn.init.constant_(self.log_diagonal, self.initial_log_variance / 2)

    def set_weight_(self, weight: Tensor) -> None:
        with torch.no_grad():
            self.mean.copy_(weight)

    def extra_repr(self) -> str:
        started = math.exp(self.initial_log_variance / 2)
        return f"{super().extra_repr()}, initial_std={started:.2g}"
