"""Whether a graph shows what functions do that work in place."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from zeromean.compression.functions import options_of
from zeromean.compression.graph import layer_of


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
    layer = layer_of(network, node)
    by_option = options_of(node).get("inplace") or getattr(layer, "inplace", False)
    in_place = by_name or by_option or node.target in OPERATORS
    return node.all_input_nodes[0] if in_place else None


def _may_be_view(network: fx.GraphModule, node: fx.Node) -> bool:
    """Whether what a node puts out may be the memory of its input."""
    if not node.all_input_nodes:
        return False
    if isinstance(layer_of(network, node), (nn.Flatten, nn.Unflatten, nn.Identity, _DropoutNd)):
        return True
    return node.op != "call_module" and getattr(node.target, "__name__", node.target) in _VIEWS


def _reads_size(node: fx.Node) -> bool:
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1] == "shape")


# What they do, apart from where they write.
OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
}
_VIEWS = {
    "chunk",
    "contiguous",
    "detach",
    "dropout",
    "expand",
    "flatten",
    "getitem",
    "movedim",
    "narrow",
    "permute",
    "reshape",
    "select",
    "split",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
}
