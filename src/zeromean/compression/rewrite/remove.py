"""Networks without the units that nobody needs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx, nn

from zeromean.compression.graph.edit import insert_behind_, layer_of, replace_node_
from zeromean.compression.modules.adapters import SelectInputs
from zeromean.compression.rewrite.resize import (
    depthwise_with_units,
    embedding_with_units,
    norm_with_units,
    with_units,
)
from zeromean.compression.units.layout import Units
from zeromean.compression.units.liveness import Needs, by_blocks
from zeromean.compression.units.reading import foldable, reads, taps
from zeromean.compression.units.recurrent import recurrent_with_units
from zeromean.compression.units.roles import Role, role_of
from zeromean.compression.units.states import states_read
from zeromean.layers.dropout.unit_noise import UnitScale


def remove_units_(network: fx.GraphModule, known: dict[fx.Node, Units], needs: Needs) -> None:
    """Keep the needed units, with what the others contribute in the biases behind them."""
    uneven = {
        node: _present_states(network, node, needs)
        for node in known
        if role_of(network, node) is Role.STATES
    }
    smaller = {node: _smaller(network, node, known, needs) for node in known}
    for node, present in uneven.items():
        if not present.all():
            select = SelectInputs(present.nonzero().flatten(), len(present))
            insert_behind_(network, node, select, "_units")
    for node, module in smaller.items():
        if module is not None:
            replace_node_(network, node, module)


def _smaller(
    network: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Units], needs: Needs
) -> nn.Module | None:
    """What a node calls without the units that nobody needs, None where nothing changes."""
    role, layer, keep = role_of(network, node), layer_of(network, node), needs.units[node]
    if role is Role.AFFINE:
        source = node.all_input_nodes[0]
        if not reads(layer, known.get(source)):
            return with_units(layer, keep)
        kept_inputs = needs.units[source]
        folded = foldable(layer, known[source]) & ~kept_inputs
        extra = taps(layer)[:, folded].sum(2) @ known[source].constants[folded]
        return with_units(layer, keep, kept_inputs, extra)
    if role is Role.RECURRENT:
        return _smaller_recurrent(network, node, known, needs)
    if keep.all():
        return None
    if role is Role.DEPTHWISE:
        return depthwise_with_units(layer, keep)
    if role is Role.EMBEDDING:
        return embedding_with_units(layer, keep)
    if role is Role.NORM:
        return norm_with_units(layer, keep)
    return UnitScale(layer.scale[keep]) if role is Role.SCALE else None


def _smaller_recurrent(
    network: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Units], needs: Needs
) -> nn.Module | None:
    layer, (source,) = layer_of(network, node), node.all_input_nodes
    silent, need = known[node].constants == 0, needs.units[node]
    if reads(layer, known.get(source)):
        inputs, constants = needs.units[source], known[source].constants
    else:
        constants = layer.weight_ih_l0.new_full((layer.input_size,), math.nan)
        inputs = constants.isnan()
    if need.all() and inputs.all():
        return None
    return recurrent_with_units(
        layer, by_blocks(layer, silent), by_blocks(layer, need), inputs, constants
    )


def _present_states(network: fx.GraphModule, node: fx.Node, needs: Needs) -> Tensor:
    """Which units are needed, among those that fill up the blocks."""
    read = states_read(network, node)
    assert read is not None
    recurrent, blocks = read
    counts = by_blocks(layer_of(network, recurrent), needs.units[recurrent]).sum(1)
    size, picked = int(counts.max()), counts[blocks.start : blocks.stop]
    return (torch.arange(size, device=picked.device) < picked.unsqueeze(1)).flatten()
