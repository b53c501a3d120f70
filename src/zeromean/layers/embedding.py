"""Look-up tables with a random weight."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    require_integer,
    shown,
)
from zeromean.distributions.posteriors.posterior import PosteriorFactory, WeightLayout
from zeromean.distributions.posteriors.zero_mean import ZeroMean
from zeromean.layers.stochastic_layer import (
    PriorChoice,
    SamplerChoice,
    StochasticLayer,
    build_posterior,
)
from zeromean.registry import register
from zeromean.samplers.linear_maps import LinearMap, LookUp


@register("layer")
class Embedding(StochasticLayer):
    """`nn.Embedding` with a random weight; the row of `padding_idx` is zero and has no noise.

    With `zm.local` and `zm.moment_matched` only the rows that are looked up are computed; the
    others draw or copy the whole table. With `zm.weight` a repeated token repeats its noise, with
    `zm.flipout` its magnitude, with `zm.local` neither.
    """

    torch_twin = nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        posterior: PosteriorFactory = ZeroMean,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        num_embeddings = require_integer("num_embeddings", num_embeddings, at_least=1)
        embedding_dim = require_integer("embedding_dim", embedding_dim, at_least=1)
        if padding_idx is not None:
            padding_idx = require_integer("padding_idx", padding_idx)
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx must lie within the {num_embeddings} embeddings, "
                    f"got {padding_idx}."
                )
            padding_idx %= num_embeddings
        layout = WeightLayout(fan_in=1, neuron_dim=1, noiseless_row=padding_idx)
        shape = (num_embeddings, embedding_dim)
        distribution = build_posterior(posterior, shape, layout=layout, device=device, dtype=dtype)
        super().__init__(distribution, None, prior, sampler)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx

    def linear_map(self) -> LinearMap:
        return LookUp(self.padding_idx)

    def prepare(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"Embedding needs a tensor of indices, got {shown(x)}; use torch.as_tensor(x)."
            )
        if x.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"Embedding needs indices of dtype int64 or int32, got {x.dtype}; use x.long()."
            )
        return x

    def plain_twin(self) -> nn.Module:
        return nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta"
        )

    @classmethod
    def from_torch(cls, module: nn.Embedding, **options: Any) -> Self:
        return cls(module.num_embeddings, module.embedding_dim, module.padding_idx, **options)

    def extra_repr(self) -> str:
        sizes = f"{self.num_embeddings}, {self.embedding_dim}"
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{sizes}{padding}, {super().extra_repr()}"
