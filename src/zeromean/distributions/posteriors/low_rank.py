"""Weights that depend on each other: noise of their own, and noise in a few shared directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.arguments import require_dtype, require_integer
from zeromean.distributions.noise import NoiseFamily, normal
from zeromean.distributions.posteriors.posterior import Posterior, WeightLayout, _require_finite
from zeromean.distributions.posteriors.spread import fast_exp
from zeromean.registry import register


@register("posterior")
class LowRank(Posterior):
    """w ~ N(mean, diag(σ²) + F Fᵀ) over all weights of a layer together, F with `rank` columns.

    What `zm.FullCovariance` is for small layers: it costs rank + 2 numbers a weight, the KL to
    `zm.Normal` is exact by the matrix determinant lemma, and with `zm.local` the outputs of every
    example are drawn together, with all of their correlations. Ong, Nott & Smith (2018).

    Args:
        rank: Directions of noise that weights share.
        log_variance: Initial log σ² of every weight. The shared noise starts a hundred times
            smaller, as it would not learn from zero.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        rank: int = 2,
        log_variance: float = -10.0,
        noise: NoiseFamily = normal,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout)
        require_dtype(dtype)
        if noise is not normal:
            raise ValueError(f"LowRank needs normal noise, got {noise.__name__}; use zm.Additive.")
        if layout.noiseless_row is not None:
            raise ValueError(
                "LowRank has no row without noise, as padding_idx wants; use zm.Additive."
            )
        self.rank = require_integer("rank", rank, at_least=1)
        self.initial_log_variance = _require_finite("log_variance", log_variance)
        factor_shape = (self.rank, *self.shape)
        self.mean = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.log_variance = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.factor = nn.Parameter(torch.empty(factor_shape, device=device, dtype=dtype))
        self.reset_parameters()

    def columns(self) -> Tensor:
        """The columns of F in the shape of the weight, `(rank, *shape)`, zero where pruned."""
        return self.factor if self.mask is None else self.factor * self.mask

    def own_variance(self) -> Tensor:
        """The variance that every weight has by itself."""
        return self.masked(fast_exp(self.log_variance))

    def moments(self, rows: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        variance = self.own_variance() + self.columns().square().sum(0)
        return self.mean_weight(rows), variance if rows is None else variance[rows]

    def mean_weight(self, rows: Tensor | None = None) -> Tensor | None:
        return self.masked(self.mean if rows is None else self.mean[rows], rows)

    def draw_noise(self) -> Tensor:
        return self.noise(self.mean.detach())

    def forward(self, noise: Tensor) -> Tensor:
        # With B = F / σ and the Cholesky factor S of 1 + BᵀB, the matrix 1 + B (1 + S)⁻¹ Bᵀ is a
        # square root of 1 + B Bᵀ: one ε for every weight is enough.
        relative, cholesky = self._relative()
        flat = noise.reshape(-1, self.numel())
        inner = cholesky + torch.eye(self.rank, device=cholesky.device, dtype=cholesky.dtype)
        shared = torch.linalg.solve_triangular(inner, relative @ flat.mT, upper=False)
        flat = (flat + shared.mT @ relative).view(noise.shape)
        return self.masked(self.mean) + self.masked(fast_exp(self.log_variance, 0.5)) * flat

    def log_determinant(self) -> Tensor:
        _, cholesky = self._relative()
        return self.masked(self.log_variance).sum() + 2 * cholesky.diagonal().log().sum()

    def _relative(self) -> tuple[Tensor, Tensor]:
        """Bᵀ, of shape `(rank, weights)`, and the Cholesky factor of 1 + Bᵀ B."""
        relative = (self.columns() * fast_exp(self.log_variance, -0.5)).flatten(1)
        gram = relative @ relative.mT
        identity = torch.eye(self.rank, device=gram.device, dtype=gram.dtype)
        return relative, torch.linalg.cholesky(gram + identity)

    def settings(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def reset_parameters(self) -> None:
        self._initialize_like_torch_(self.mean)
        nn.init.constant_(self.log_variance, self.initial_log_variance)
        nn.init.normal_(self.factor, std=0.1 * math.exp(self.initial_log_variance / 2))

    def set_weight_(self, weight: Tensor) -> None:
        with torch.no_grad():
            self.mean.copy_(weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"
