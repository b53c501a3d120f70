"""What can be removed from a network: its units, and who needs them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import fx, nn

from zeromean.compression.constants import units
from zeromean.compression.flattening import recognise_flattening_
from zeromean.compression.folding import fold_scales_, merge_constants_
from zeromean.compression.guards import insert_guards_
from zeromean.compression.layout import Units
from zeromean.compression.needs import Needs, needed
from zeromean.compression.tracing import record_shapes_, trace
from zeromean.monte_carlo import Inputs, as_arguments
from zeromean.samplers import mean
from zeromean.sampling import sampling


@dataclass(frozen=True)
class Analysis:
    """A network with its multipliers in the weights, its units, and those that must stay."""

    network: fx.GraphModule
    units: dict[fx.Node, Units]
    needs: Needs


def graph_of(model: nn.Module, example_inputs: Inputs | None) -> fx.GraphModule:
    """The graph of a model; raises what `trace` raises."""
    if example_inputs is None:
        return trace(model)
    args, kwargs = as_arguments(example_inputs)
    return trace(model, inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)


def analyse(network: fx.GraphModule, example_inputs: Inputs | None) -> Analysis:
    """Find what can be removed. Changes the network, but not what it computes."""
    if example_inputs is not None:
        with sampling(network, mean):
            record_shapes_(network, *as_arguments(example_inputs))
    recognise_flattening_(network)
    insert_guards_(network)
    fold_scales_(network)
    merge_constants_(network)
    known = units(network)
    return Analysis(network, known, needed(network, known))
