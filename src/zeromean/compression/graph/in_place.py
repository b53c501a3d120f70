"""Functions that work in place: whether they change memory that another node reads too."""

from __future__ import annotations

from typing import Any

from torch import fx

from zeromean.compression.graph.calls import options_of
from zeromean.compression.graph.operations import IN_PLACE, NEW_MEMORY, operation_of


def changes_what_others_read(network: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node changes in place what is read after it, or may be read through a view."""
    reader, changed = node, _changed_in_place(network, node)
    while changed is not None:
        others = [user for user in changed.users if user is not reader and not _reads_size(user)]
        if any(node < other or _may_be_view(network, other) for other in others):
            return True
        is_view = _may_be_view(network, changed)
        reader, changed = changed, changed.all_input_nodes[0] if is_view else None
    return False


def _changed_in_place(network: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The node whose output another one changes, if it does."""
    if not node.all_input_nodes:
        return None
    output = node.kwargs.get("out")
    if isinstance(output, fx.Node):
        return output
    by_name = node.op == "call_method" and str(node.target).endswith("_")
    by_name |= node.op == "call_function" and getattr(node.target, "__name__", "").endswith("_")
    layer = _layer_of(network, node)
    by_option = options_of(node).get("inplace") or getattr(layer, "inplace", False)
    in_place = by_name or by_option or node.target in IN_PLACE
    return node.all_input_nodes[0] if in_place else None


def _may_be_view(network: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the output of a node may share the memory of its input."""
    if not node.all_input_nodes:
        return False
    if node.op == "call_module":
        operation = operation_of(_layer_of(network, node))
        return operation is not None and operation.view
    # A function that is not known might pass its input on, as many do: x.float(), x.T, F.dropout.
    name = getattr(node.target, "__name__", node.target)
    in_place = options_of(node).get("inplace")
    return bool(name not in NEW_MEMORY or in_place)


def _layer_of(network: fx.GraphModule, node: fx.Node) -> Any:
    return network.get_submodule(str(node.target)) if node.op == "call_module" else None


def _reads_size(node: fx.Node) -> bool:
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1] == "shape")
