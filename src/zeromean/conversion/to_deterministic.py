"""Plain networks that predict by the means."""

from __future__ import annotations

from typing import Literal

from torch import nn

from zeromean.arguments import require_choice, require_model
from zeromean.conversion.twins import (
    plain_module,
)
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.dropout.input_noise import fold_input_noise_, take_input_noise_
from zeromean.layers.lora import merge_adapters_
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.layers.surgery import copy_with_masks, replace_modules_


def to_deterministic(model: nn.Module, weights: Literal["mean", "sample"] = "mean") -> nn.Module:
    """A copy of the model with plain torch layers in place of the stochastic ones.

    Adapters of `zm.add_lora_` become a part of the weights that they belong to.

    Args:
        weights: "mean" takes the mean of every weight (the weight scaling rule); "sample" draws
            the weights once, which gives one member of the ensemble. A zero-mean layer has only
            the latter: all its means are zero. Noise on units becomes fixed multipliers alike.
    """
    require_model(model)
    require_choice("weights", weights, ("mean", "sample"))
    model = copy_with_masks(model)
    input_noise = take_input_noise_(model)
    drawn: dict[Posterior, nn.Parameter] = {}
    plain: dict[nn.Module, nn.Module] = {
        module: plain_module(name or "the model", module, weights, drawn)
        for name, module in stochastic_modules(model).items()
    }
    model = merge_adapters_(replace_modules_(model, plain))
    fold_input_noise_(model, input_noise, weights)
    return model
