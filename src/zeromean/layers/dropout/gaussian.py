"""Gaussian noise on units, with a learned rate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zeromean import functional
from zeromean.arguments import require_numbers
from zeromean.distributions.noise import normal
from zeromean.layers.dropout.rate import RatedNoise


class GaussianDropout(RatedNoise):
    """Multipliers from N(1, α), with the α of binary dropout at rate p: p / (1 − p).

    Learned, this is variational dropout with correlated weight noise: the prior is log-uniform,
    and its KL counts the units, not their weights. Kingma et al. (2015), section 3.2.

    Args:
        num_features: Number of units: C of an input `(N, C, *)`.
        p: Drop rate of the binary dropout that has the same variance; sets the initial α.
        share: One α for the "layer" or for each "unit".
        learn: Learn α. Otherwise it stays as it is and there is no KL term.
    """

    def __init__(
        self,
        num_features: int,
        p: float = 0.5,
        *,
        share: Literal["layer", "unit"] = "layer",
        learn: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        require_numbers(p=p)
        if not 0 < p < 1:
            raise ValueError(f"p must lie between 0 and 1, got {p}.")
        super().__init__(num_features, p, share, learn, device, dtype)
        self.learn = learn
        self.reset_parameters()

    def draw_noise(self, num_objects: int = 1) -> Tensor:
        return normal(self.log_alpha.new_empty(num_objects, self.num_features))

    def multipliers(self, noise: Tensor) -> Tensor:
        return 1 + (0.5 * self.log_alpha).exp() * noise

    def kl_per_unit(self) -> Tensor:
        kl = functional.log_uniform_kl((-functional.wide(self.log_alpha)).exp())
        return kl.expand(self.num_features)

    def extra_repr(self) -> str:
        return f"{self.num_features}, p={self.p:g}, share={self.share!r}, learn={self.learn}"
