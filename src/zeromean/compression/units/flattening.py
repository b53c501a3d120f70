"""Calls of view and reshape that are nothing but a Flatten."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from zeromean.compression.graph.network import Network
from zeromean.compression.graph.roles import Role
from zeromean.compression.units.layout import Units, concatenated_dim
from zeromean.compression.units.sources import features_behind


def recognise_flattening_(network: Network, known: dict[fx.Node, Units]) -> bool:
    """Replace views by modules that say what happens to the units.

    Returns whether it has changed the network: then more is known of the views behind.
    """
    changed = False
    for node in network.nodes:
        if node.op == "call_method" and node.target in ("view", "reshape"):
            module = _flatten_for(network, node, known)
            if module is not None:
                network.replace_(node, module)
                changed = True
    if changed:
        network.drop_unread_()  # What asked for the sizes of tensors to flatten.
    return changed


def _flatten_for(network: Network, node: fx.Node, known: dict[fx.Node, Units]) -> nn.Module | None:
    source: Any = node.args[0]
    sizes: Any = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        (sizes,) = sizes
    if len(sizes) != 2 or node.kwargs:
        return None
    first, second = sizes
    by_batch = isinstance(first, fx.Node) and _is_batch_size(network, first, source)
    if by_batch and second == -1:
        return nn.Flatten()
    if not (by_batch or first == -1) or not isinstance(second, int):
        return None
    return _flatten_to(network, node, known.get(source), second)


def _flatten_to(
    network: Network, node: fx.Node, source: Units | None, features: int
) -> nn.Module | None:
    """For x.view(-1, features)."""
    if source is None:
        return None
    if source.last:
        return nn.Flatten(0, -2) if features == len(source) else None
    if features_behind(network, node) != features or features % len(source):
        return None
    # view(-1, features) might cut an example into pieces. Where no example input shows whether it
    # does, the layer behind would refuse what Flatten makes of it.
    shape = network[node.all_input_nodes[0]].shape
    return nn.Flatten() if shape is None or shape[1:].numel() == features else None


def _is_batch_size(network: Network, size: Any, of: fx.Node) -> bool:
    """x.size(0), x.size()[0] or x.shape[0], of a tensor that has its batch from x."""
    if size.target is operator.getitem:
        size, dim = size.args
    else:
        dim = size.args[1] if len(size.args) > 1 else size.kwargs.get("dim")
    if not isinstance(size, fx.Node) or (size.op, size.target) != ("call_method", "size"):
        return False
    return dim == 0 and _have_one_batch(network, size.all_input_nodes[0], of)


def _have_one_batch(network: Network, before: fx.Node, node: fx.Node) -> bool:
    """Whether everything that a node is made from comes from another one, example by example."""
    ahead, seen = [node], {before}
    while ahead:
        here = ahead.pop()
        if here in seen:
            continue
        role = network.role(here)
        if role not in _EXAMPLE_BY_EXAMPLE:
            return False
        if role is Role.CAT and not (concatenated_dim(here) == -1 or concatenated_dim(here) > 0):
            return False  # More examples than before.
        seen.add(here)
        ahead.extend(here.all_input_nodes)
    return True


_EXAMPLE_BY_EXAMPLE = {
    Role.AFFINE,
    Role.DEPTHWISE,
    Role.GROUPED,
    Role.POINTWISE,
    Role.NORM,
    Role.SCALE,
    Role.RESAMPLE,
    Role.AVERAGE_POOL,
    Role.FLATTEN,
    Role.COMBINE,
    Role.CAT,
}
