"""Which units of a network anybody needs.

A unit is needed when something reads it that cannot take its constant into a bias. Everything else
can be removed, which is what `zm.compress` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zeromean.compression.graph.annotations import blocks_of
from zeromean.compression.graph.network import Network
from zeromean.compression.graph.roles import Role
from zeromean.compression.units.layout import Units
from zeromean.compression.units.reading import foldable, reads, taps
from zeromean.compression.units.recurrent import spread_needs_
from zeromean.compression.units.sources import unbundled, unit_sources


@dataclass(frozen=True)
class Needs:
    """What must stay of a network.

    Attributes:
        units: Which units of every node must be there.
        readers: For nodes that lose nothing, the node that reads all they have.
    """

    units: dict[fx.Node, Tensor]
    readers: dict[fx.Node, fx.Node]


def needed(network: Network, known: dict[fx.Node, Units]) -> Needs:
    """Which units must be there: of every node at least one, so that shapes stay whole."""
    units = {n: torch.zeros_like(u.constants, dtype=torch.bool) for n, u in known.items()}
    needs = Needs(units, {})
    while True:
        _spread_(network, known, needs)
        empty = next((node for node in reversed(units) if not units[node].any()), None)
        if empty is None:
            return needs
        # A constant unit, if there is one: it reads nothing, so that nothing else must stay for it.
        units[empty][int(known[empty].constants.isnan().int().argmin())] = True


def by_blocks(layer: Any, flags: Tensor) -> Tensor:
    """Flags of all units of a recurrent layer as `(blocks, hidden_size)`."""
    return flags.view(blocks_of(layer), -1)


def _spread_(network: Network, known: dict[fx.Node, Units], needs: Needs) -> None:
    """From what is read to what must be there, until nothing changes."""
    before = -1
    while before != (before := sum(int(need.sum()) for need in needs.units.values())):
        for node in reversed(network.nodes):
            role = network.role(node)
            if _needs_all_channels(network, node, known):
                needs.units[node].fill_(True)
            if role is Role.RECURRENT:
                _spread_recurrent_(network, node, known, needs)
            elif role is not Role.BUNDLE:  # Whoever reads that reads the recurrent layer.
                for source in unit_sources(network, node):
                    if source in known:
                        _spread_to_(network, node, source, known, needs)
                    else:
                        _need_all_(network, source, node, needs)


def _spread_recurrent_(
    network: Network, node: fx.Node, known: dict[fx.Node, Units], needs: Needs
) -> None:
    layer, (source,) = network.layer(node), node.all_input_nodes
    silent = by_blocks(layer, known[node].constants == 0)
    inputs = spread_needs_(layer, silent, by_blocks(layer, needs.units[node]))
    if not reads(layer, known.get(source)):
        _need_all_(network, source, node, needs)
    else:
        needs.units[source].logical_or_(inputs & known[source].constants.isnan())


def _spread_to_(
    network: Network,
    node: fx.Node,
    source: fx.Node,
    known: dict[fx.Node, Units],
    needs: Needs,
) -> None:
    role, layer = network.role(node), network.layer(node)
    makes = role in (Role.AFFINE, Role.DEPTHWISE)
    if node not in known or role is Role.GROUPED or (makes and not reads(layer, known[source])):
        _need_all_(network, source, node, needs)
        return
    ours, theirs = needs.units[node], needs.units[source]
    if role is Role.AFFINE:
        read = (taps(layer)[ours] != 0).any(2).any(0)
        theirs |= read & ~foldable(layer, known[source])
        return
    if node in needs.readers:
        needs.readers.setdefault(source, needs.readers[node])
    if role is Role.STATES:
        theirs = _states_of(network, node, theirs)
    elif role is Role.CAT:
        ours = _part_of(network, node, source, known, ours)
    elif role in (Role.FLATTEN, Role.DEPTHWISE):
        # Every unit becomes several, which stay together; those of sequences lie innermost.
        innermost = known[source].last
        several = ours.view(-1, len(theirs)).t() if innermost else ours.view(len(theirs), -1)
        theirs |= several.any(1)
        several |= theirs.unsqueeze(1)
        return
    # One to one: what one has, the other has.
    theirs |= ours
    ours |= theirs


def _needs_all_channels(network: Network, node: fx.Node, known: dict[fx.Node, Units]) -> bool:
    """Whether a convolution of groups keeps all its outputs, for it must keep all its inputs."""
    role = network.role(node)
    if role is not Role.DEPTHWISE:
        return role is Role.GROUPED
    return not reads(network.layer(node), known.get(node.all_input_nodes[0]))


def _need_all_(network: Network, source: fx.Node, reader: fx.Node, needs: Needs) -> None:
    source = unbundled(network, source)
    if source in needs.units:
        needs.units[source].fill_(True)
        needs.readers.setdefault(source, reader)


def _states_of(network: Network, node: fx.Node, hidden: Tensor) -> Tensor:
    """The flags of the units that a node picks, of all units of a recurrent layer."""
    blocks, recurrent = network[node].blocks, unbundled(network, node.all_input_nodes[0])
    assert blocks is not None
    picked = by_blocks(network.layer(recurrent), hidden)[blocks.start : blocks.stop]
    return picked.view(-1)


def _part_of(
    network: Network,
    node: fx.Node,
    source: fx.Node,
    known: dict[fx.Node, Units],
    flags: Tensor,
) -> Tensor:
    """The flags of the units that come from one source of a concatenation."""
    sources = unit_sources(network, node)
    start = sum(len(known[s]) for s in sources[: sources.index(source)])
    return flags[start : start + len(known[source])]
