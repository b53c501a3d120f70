"""Whether a graph shows what functions do that work in place."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from zeromean.compression.graph.edit import layer_of
from zeromean.compression.graph.operations import options_of


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
    # A function that is not known might pass its input on, as many do: x.float(), x.T, F.dropout.
    name = getattr(node.target, "__name__", node.target)
    in_place = options_of(node).get("inplace")
    return node.op != "call_module" and bool(name not in _NEW_MEMORY or in_place)


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
# Functions and methods that never put out the memory of their input. In place, they end in _.
_NEW_MEMORY = {
    "abs",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "add",
    "amax",
    "amin",
    "argmax",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "baddbmm",
    "batch_norm",
    "bmm",
    "cat",
    "celu",
    "clamp",
    "clone",
    "concat",
    "concatenate",
    "conv1d",
    "conv2d",
    "conv3d",
    "cos",
    "div",
    "einsum",
    "elu",
    "embedding",
    "exp",
    "floordiv",
    "gelu",
    "group_norm",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log",
    "log_softmax",
    "logsigmoid",
    "logsumexp",
    "matmul",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "maximum",
    "mean",
    "minimum",
    "mish",
    "mm",
    "mod",
    "mul",
    "neg",
    "norm",
    "normalize",
    "pow",
    "prod",
    "relu",
    "relu6",
    "rsqrt",
    "scaled_dot_product_attention",
    "selu",
    "sigmoid",
    "silu",
    "sin",
    "softmax",
    "softplus",
    "softsign",
    "sqrt",
    "square",
    "stack",
    "std",
    "sub",
    "sum",
    "tanh",
    "truediv",
    "var",
    "where",
}
