"""What a compressed network takes for granted about the dimensions of its activations."""

from __future__ import annotations

from torch import fx, nn

from zeromean.compression.graph.network import Network
from zeromean.compression.graph.roles import Role
from zeromean.compression.modules.adapters import RequireDim
from zeromean.compression.units.layout import Dims, Units
from zeromean.compression.units.sources import unit_sources
from zeromean.layers.linear import Linear


def insert_guards_(network: Network, known: dict[fx.Node, Units]) -> bool:
    """Check dimensions wherever our idea of where the units lie holds for some numbers only.

    Returns whether it has changed the network.
    """
    wanted: dict[fx.Node, Dims] = {}
    for node, found in known.items():
        if found.assumes is not None:
            for source in unit_sources(network, node):
                if not known[source].proven:
                    origin = _origin(network, source)
                    wanted[origin] = _both(wanted.get(origin, found.assumes), found.assumes)
    for node, dims in wanted.items():
        network.insert_behind_(node, RequireDim(*dims), "_dims")
    return bool(wanted)


def _origin(network: Network, node: fx.Node) -> fx.Node:
    """The first node that has the dimensions of another one, in front of its linear layers."""
    while True:
        role, layer = network.role(node), network.layer(node)
        linear = role is Role.AFFINE and isinstance(layer, (nn.Linear, Linear))
        if not linear and role not in (Role.POINTWISE, Role.NORM, Role.SCALE):
            return node
        node = node.all_input_nodes[0]


def _both(ours: Dims, theirs: Dims) -> Dims:
    most = [dims for dims in (ours[1], theirs[1]) if dims is not None]
    return max(ours[0], theirs[0]), min(most, default=None)
