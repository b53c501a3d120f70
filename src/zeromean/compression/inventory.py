"""The layers of a model, and its parameters outside of layers, as plans and reports list them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zeromean.compression.graph.trace import is_leaf
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.dropout.hidden_noise import hidden_noises
from zeromean.layers.dropout.input_noise import input_noises
from zeromean.layers.stochastic_module import StochasticModule


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer that has parameters, by its name; noise on what a layer reads is no other one."""
    found = (*input_noises(model).values(), *hidden_noises(model).values())
    on_inputs = {noise.noise for noise in found}
    layers = {name: module for name, module in model.named_modules() if _is_layer(module)}
    return {name: module for name, module in layers.items() if module not in on_inputs}


def loose_parameters(model: nn.Module) -> dict[str, Tensor]:
    """What is not in a layer: positions to add to embeddings, say."""
    in_leaves = {id(p) for m in model.modules() if is_leaf(m) for p in m.parameters()}
    return {n: p for n, p in model.named_parameters() if id(p) not in in_leaves}


def sizes_of(module: Any) -> tuple[int, ...]:
    """Inputs and outputs of a layer; of BatchNorm and the like, units."""
    for names in _SIZES:
        sizes = tuple(getattr(module, name) for name in names if hasattr(module, name))
        if sizes:
            return sizes
    return tuple(getattr(module, "normalized_shape", ()))


def _is_layer(module: nn.Module) -> bool:
    own = any(parameter is not None for parameter in module._parameters.values())
    layer = own and is_leaf(module) and not isinstance(module, Posterior)
    return isinstance(module, StochasticModule) or layer


_SIZES = [
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("input_size", "hidden_size"),
    ("num_embeddings", "embedding_dim"),
    ("num_features",),
    ("num_channels",),
    ("num_parameters",),
]
