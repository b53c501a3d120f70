"""Dense layers with a random weight."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    require_floating,
    require_integer,
    require_same_dtype,
)
from zeromean.distributions.posteriors.posterior import PosteriorFactory
from zeromean.distributions.posteriors.zero_mean import ZeroMean
from zeromean.layers.stochastic_layer import (
    BiasChoice,
    PriorChoice,
    SamplerChoice,
    StochasticLayer,
    build_posterior,
)
from zeromean.registry import register
from zeromean.samplers.linear_maps import Dense, LinearMap


@register("layer")
class Linear(StochasticLayer):
    """`nn.Linear` with a random weight: `(*, in_features)` to `(*, out_features)`."""

    torch_twin = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: BiasChoice = True,
        *,
        posterior: PosteriorFactory = ZeroMean,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        in_features = require_integer("in_features", in_features, at_least=1)
        out_features = require_integer("out_features", out_features, at_least=1)
        shape = (out_features, in_features)
        distribution = build_posterior(posterior, shape, device=device, dtype=dtype)
        super().__init__(distribution, out_features, prior, sampler, bias)
        self.in_features = in_features
        self.out_features = out_features

    def linear_map(self) -> LinearMap:
        return Dense()

    def prepare(self, x: Tensor) -> Tensor:
        require_floating("Linear", x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"Linear needs an input of shape (*, {self.in_features}), got {tuple(x.shape)}; "
                "flatten or transpose it so that the features come last."
            )
        require_same_dtype("Linear", x, self.weight.dtype)
        return x

    def plain_twin(self) -> nn.Module:
        bias = self.bias is not None
        return nn.Linear(self.in_features, self.out_features, bias, device="meta")

    @classmethod
    def from_torch(cls, module: nn.Linear, **options: Any) -> Self:
        return cls(module.in_features, module.out_features, module.bias is not None, **options)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {super().extra_repr()}"
