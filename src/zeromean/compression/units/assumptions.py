"""What a compressed network takes for granted about the dimensions of its activations."""

from __future__ import annotations

from torch import fx, nn

from zeromean.compression.graph.edit import insert_behind_, layer_of
from zeromean.compression.modules.adapters import RequireDim
from zeromean.compression.units.constants import units
from zeromean.compression.units.layout import Dims
from zeromean.compression.units.roles import Role, role_of, unit_sources
from zeromean.layers.linear import Linear


def insert_guards_(network: fx.GraphModule) -> None:
    """Check dimensions wherever our idea of where the units lie holds for some numbers only."""
    known = units(network)
    wanted: dict[fx.Node, Dims] = {}
    for node, found in known.items():
        if found.assumes is not None:
            for source in unit_sources(network, node):
                if not known[source].proven:
                    origin = _origin(network, source)
                    wanted[origin] = _both(wanted.get(origin, found.assumes), found.assumes)
    for node, dims in wanted.items():
        insert_behind_(network, node, RequireDim(*dims), "_dims")


def _origin(network: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The first node that has the dimensions of another one, in front of its linear layers."""
    while True:
        role, layer = role_of(network, node), layer_of(network, node)
        linear = role is Role.AFFINE and isinstance(layer, (nn.Linear, Linear))
        if not linear and role not in (Role.POINTWISE, Role.NORM, Role.SCALE):
            return node
        node = node.all_input_nodes[0]


def _both(ours: Dims, theirs: Dims) -> Dims:
    most = [dims for dims in (ours[1], theirs[1]) if dims is not None]
    return max(ours[0], theirs[0]), min(most, default=None)
