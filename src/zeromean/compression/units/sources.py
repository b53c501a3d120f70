"""Whose units a node reads, and who reads its own."""

from __future__ import annotations

from torch import fx

from zeromean.compression.graph.network import Network
from zeromean.compression.graph.roles import Role


def unit_sources(network: Network, node: fx.Node) -> list[fx.Node]:
    """The nodes whose units a node reads: for what picks a last state, the recurrent layer.

    Last states, taken together, have no units that could be removed one by one: they are a block
    for each layer and direction.
    """
    if network.role(node) is not Role.STATES:
        return node.all_input_nodes
    return [unbundled(network, source) for source in node.all_input_nodes]


def unbundled(network: Network, node: fx.Node) -> fx.Node:
    """For last states, all together, the recurrent layer that they come from; else the node."""
    while network.role(node) is Role.BUNDLE:
        node = node.all_input_nodes[0]
    return node


def features_behind(network: Network, node: fx.Node) -> int | None:
    """How many features a node must have, or a layer further on would refuse them."""
    for user in node.users:
        role, layer = network.role(user), network.layer(user)
        if role is Role.AFFINE:
            return getattr(layer, "in_features", None)
        if role is Role.NORM:
            return layer.num_features
        if role is Role.SCALE:
            return layer.scale.numel()
        if role is Role.POINTWISE:
            features = features_behind(network, user)
            if features is not None:
                return features
    return None
