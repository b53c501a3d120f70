"""Networks without the units that nobody needs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx, nn

from zeromean.compression.graph.network import Network
from zeromean.compression.graph.roles import Role
from zeromean.compression.modules.adapters import SelectInputs
from zeromean.compression.plan import Decision, Reader, Reason, UnitsLeft, Unknown
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
from zeromean.compression.units.sources import unbundled
from zeromean.layers.dropout.unit_noise import UnitScale


def remove_units_(network: Network, known: dict[fx.Node, Units], needs: Needs) -> None:
    """Keep the needed units, with what the others contribute in the biases behind them."""
    _decide_(network, needs)
    uneven = {
        node: _present_states(network, node, needs)
        for node in known
        if network.role(node) is Role.STATES
    }
    smaller = {node: _smaller(network, node, known, needs) for node in known}
    for node, present in uneven.items():
        if not present.all():
            select = SelectInputs(present.nonzero().flatten(), len(present))
            network.insert_behind_(node, select, "_units")
    for node, module in smaller.items():
        if module is not None:
            network.replace_(node, module)


def _decide_(network: Network, needs: Needs) -> None:
    """Note for every layer what it loses, or why it loses nothing."""
    # Of a layer that is called several times, the first call counts.
    for node in reversed(network.nodes):
        if network[node].places:
            decision = _decision(network, node, needs)
            network.decide_(node, decision)


def _decision(network: Network, node: fx.Node, needs: Needs) -> Decision | None:
    role, layer = network.role(node), network.layer(node)
    if role is Role.OTHER:
        return network[node].obstacle or Unknown(type(layer).__name__)
    if role is Role.GROUPED:
        return Reason.GROUPS
    if node not in needs.units:
        return None
    need = needs.units[node]
    gone, reader = int((~need).sum()), needs.readers.get(node)
    counts = by_blocks(layer, need).sum(1) if role is Role.RECURRENT else need.new_zeros(1)
    return UnitsLeft(
        gone=0 if role in _PASSING else gone,
        total=len(need),
        reader=None if gone or reader is None else _reader(network, reader),
        uneven=bool(counts.min() < counts.max()),
    )


def _reader(network: Network, node: fx.Node) -> Reader:
    if node.op == "output":
        return Reader()
    if node.op == "call_module":
        return Reader(network.layer_name(node), type(network.layer(node)).__name__)
    return Reader(getattr(node.target, "__name__", str(node.target)))


def _smaller(
    network: Network, node: fx.Node, known: dict[fx.Node, Units], needs: Needs
) -> nn.Module | None:
    """What a node calls without the units that nobody needs, None where nothing changes."""
    role, layer, keep = network.role(node), network.layer(node), needs.units[node]
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
    network: Network, node: fx.Node, known: dict[fx.Node, Units], needs: Needs
) -> nn.Module | None:
    layer, (source,) = network.layer(node), node.all_input_nodes
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


def _present_states(network: Network, node: fx.Node, needs: Needs) -> Tensor:
    """Which units are needed, among those that fill up the blocks."""
    blocks, recurrent = network[node].blocks, unbundled(network, node.all_input_nodes[0])
    assert blocks is not None
    counts = by_blocks(network.layer(recurrent), needs.units[recurrent]).sum(1)
    size, picked = int(counts.max()), counts[blocks.start : blocks.stop]
    return (torch.arange(size, device=picked.device) < picked.unsqueeze(1)).flatten()


# What they lose is what those in front of them lose.
_PASSING = {Role.NORM, Role.SCALE}
