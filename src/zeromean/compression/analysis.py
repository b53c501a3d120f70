"""What can be removed from a network: its units, and who needs them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from zeromean.compression.graph.network import Network
from zeromean.compression.graph.trace import record_shapes_, trace
from zeromean.compression.rewrite.fold import fold_scales_, merge_constants_
from zeromean.compression.units.assumptions import insert_guards_
from zeromean.compression.units.constants import units
from zeromean.compression.units.flattening import recognise_flattening_
from zeromean.compression.units.layout import Units
from zeromean.compression.units.liveness import Needs, needed
from zeromean.layers.blocks import restored_modes, sampling
from zeromean.prediction.inputs import Inputs, as_arguments
from zeromean.samplers.weights import mean


@dataclass(frozen=True)
class Analysis:
    """The units of a network that has its multipliers in the weights, and those that must stay."""

    units: dict[fx.Node, Units]
    needs: Needs


def run_example(model: nn.Module, example_inputs: Inputs) -> Any:
    """What the model returns for an example, with its means; ValueError where that fails."""
    args, kwargs = as_arguments(example_inputs)
    # A model may write into what it is given.
    args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
    try:
        with torch.no_grad(), restored_modes(model), sampling(model.eval(), mean):
            return model(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"The model does not run on example_inputs ({type(error).__name__}: {error}); pass "
            "what model(…) takes: a tensor, a tuple of positional or a mapping of keyword "
            "arguments."
        ) from error


def network_of(model: nn.Module, example_inputs: Inputs | None) -> Network:
    """The graph of a model; raises what `trace` raises."""
    if example_inputs is None:
        return trace(model)
    args, kwargs = as_arguments(example_inputs)
    return trace(model, inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)


def units_of_(network: Network, example_inputs: Inputs | None) -> dict[fx.Node, Units]:
    """The units of a network, in which views have become modules that say what happens to them."""
    if example_inputs is not None:
        with sampling(network.module, mean):
            record_shapes_(network, *as_arguments(example_inputs))
    known = units(network)
    while recognise_flattening_(network, known):
        known = units(network)
    return known


def analyse_(network: Network, example_inputs: Inputs | None, *, fold: bool = True) -> Analysis:
    """Find what can be removed. Changes the network, but not what it computes.

    Units are looked for once in every state of the network.

    Args:
        fold: Take BatchNorm and multipliers into the weights. Without, the network can be trained.
    """
    known = units_of_(network, example_inputs)
    rewrites = (insert_guards_, fold_scales_, merge_constants_) if fold else (insert_guards_,)
    for rewrite_ in rewrites:
        if rewrite_(network, known):
            known = units(network)
    return Analysis(known, needed(network, known))
