"""Low-rank adapters with random weights: what is trained next to a layer that stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.distributions.posteriors.posterior import PosteriorFactory
from zeromean.layers.linear import Linear
from zeromean.layers.stochastic_layer import PriorChoice, SamplerChoice
from zeromean.layers.surgery import replace_modules_


class LoraLinear(nn.Module):
    """A frozen layer plus `alpha / rank · up(down(x))`, whose two weights are random.

    `up` starts at zero, so that the layer computes what it did. Hu et al. (2022).

    Args:
        base: nn.Linear, or what keeps its weight transposed (Hugging Face's Conv1D).
        rank: Outputs of `down`, and inputs of `up`.
        alpha: Weight of the adapter, times the rank: not the α of the noise.
        posteriors: What q(W) is, of `down` and of `up`.
    """

    def __init__(
        self,
        base: Any,
        rank: int,
        alpha: float,
        *,
        posteriors: tuple[PosteriorFactory, PosteriorFactory],
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
    ):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.transposed = not isinstance(base, nn.Linear)
        outputs, inputs = base.weight.T.shape if self.transposed else base.weight.shape
        options: dict[str, Any] = {"prior": prior, "sampler": sampler}
        options |= {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = Linear(inputs, rank, bias=False, posterior=posteriors[0], **options)
        self.up = Linear(rank, outputs, bias=False, posterior=posteriors[1], **options)
        parts = self.down.weight, self.up.weight
        if not all(part.has_mean and not part.positive for part in parts):
            raise ValueError(
                "Adapters need a posterior with means of both signs, such as zm.Additive: with "
                "zero means, those of their product are zero whatever they learn."
            )
        self.up.weight.set_weight_(torch.zeros_like(self.up.weight.get_parameter("mean")))
        self.scaling = alpha / rank
        self.train(base.training)

    def forward(self, input: Tensor) -> Tensor:
        return self.base(input) + self.scaling * self.up(self.down(input))

    @property
    def rank(self) -> int:
        """Components that have not been pruned."""
        mask = self.up.weight.mask
        return self.up.in_features if mask is None else int(mask.any(0).sum())

    @torch.no_grad()
    def component_moments(self) -> tuple[Tensor, Tensor]:
        """Squared mean, and mean square, of every component `up[:, i] · down[i]`, summed."""
        squared_mean = mean_square = torch.ones((), dtype=torch.float64)
        for layer, dim in ((self.down, 1), (self.up, 0)):
            mean, variance = layer.weight.moments()
            assert mean is not None
            signal = mean.double().square().sum(dim)
            squared_mean = squared_mean.to(signal.device) * signal
            mean_square = mean_square.to(signal.device) * (signal + variance.double().sum(dim))
        return squared_mean, mean_square

    def merged(self) -> nn.Module:
        """The base with the adapter in its weight, once `down` and `up` are plain."""
        down, up = self.down.get_parameter("weight"), self.up.get_parameter("weight")
        change = self.scaling * (up @ down)
        layer = copy.deepcopy(self.base)
        weight = layer.weight + (change.T if self.transposed else change)
        layer.weight = nn.Parameter(weight.detach(), requires_grad=down.requires_grad)
        return layer.train(self.training)


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with adapters, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}


def merge_adapters_(model: nn.Module) -> nn.Module:
    """Put adapters that have become plain into the weights of their layers."""
    layers = lora_layers(model).values()
    plain = [layer for layer in layers if isinstance(layer.up, nn.Linear)]
    return replace_modules_(model, {layer: layer.merged() for layer in plain}) if plain else model
