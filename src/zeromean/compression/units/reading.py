"""How layers read units: one by one, with which weights, and whether they can fold constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeromean.compression.units.layout import Units
from zeromean.distributions.posteriors.factorized import independent
from zeromean.layers.linear import Linear
from zeromean.layers.stochastic_layer import StochasticLayer


def reads(layer: Any, source: Units | None) -> bool:
    """Whether the inputs of a layer are the units of an activation, one by one."""
    if source is None:
        return False
    if isinstance(layer, nn.RNNBase):
        return source.last and len(source) == layer.input_size
    if isinstance(layer, (nn.Linear, Linear)):
        return source.last and len(source) == layer.in_features
    return not source.last and len(source) == layer.in_channels


def foldable(layer: Any, source: Units) -> Tensor:
    """Which constant inputs a layer can take into its bias: exactly, at every position."""
    if isinstance(layer, StochasticLayer) or not _is_uniform(layer):
        # Noise multiplies whatever is there, and zeros around an image are not the constant.
        return source.constants == 0
    return ~source.constants.isnan()


def taps(layer: Any) -> Tensor:
    """The weight of a layer as `(outputs, inputs, places)`; for a variance layer its scale."""
    if isinstance(layer, StochasticLayer):
        weight = independent(layer.weight, "zm.compress").mean_and_scale()[1]
    else:
        weight = layer.weight
    if getattr(layer, "transposed", False):
        weight = weight.transpose(0, 1)
    return weight.detach().flatten(2) if weight.dim() > 2 else weight.detach().unsqueeze(2)


def scale_and_shift(layer: Any) -> tuple[Tensor, Tensor]:
    """What BatchNorm, or noise on units, multiplies every unit by and adds to it."""
    if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return layer.scale, torch.zeros_like(layer.scale)
    mean: Any = layer.running_mean
    variance: Any = layer.running_var
    scale = (variance + layer.eps).rsqrt()
    scale = scale if layer.weight is None else scale * layer.weight
    return scale, -mean * scale if layer.bias is None else layer.bias - mean * scale


def _is_uniform(layer: Any) -> bool:
    """Whether a constant input adds the same to the output at every position."""
    if isinstance(layer, nn.Linear):
        return True
    if layer.transposed:
        return False
    return layer.padding_mode != "zeros" or not any(layer._reversed_padding_repeated_twice)
