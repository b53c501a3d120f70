"""From a model to the graph of its modules, through torch.fx."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Collection
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from zeromean.compression.graph import has_hooks, layer_of, replace_node_
from zeromean.dropout import UnitScale
from zeromean.stochastic import StochasticModule


def trace(model: nn.Module, given: Collection[str] = ()) -> fx.GraphModule:
    """The graph of a model in eval mode, with modules in place of known functions.

    Raises what torch.fx raises where a forward function depends on data, and ValueError where the
    graph would not show what happens: hooks of the model itself, and activations changed in place
    that are read elsewhere.

    Args:
        given: Names of the optional arguments that the graph takes; the others keep their defaults.
    """
    if _Tracer().is_leaf_module(model, ""):
        model = nn.Sequential(model)
    if has_hooks(model):
        raise ValueError("the model has hooks of its own")
    network = fx.GraphModule(model, _graph_of(model, given))
    for node in network.graph.nodes:
        if _changes_what_others_read(network, node):
            raise ValueError(f"{node} changes in place what something else reads too")
        node.target = _IN_PLACE.get(node.target, node.target)
    calls = Counter(node.target for node in network.graph.nodes if node.op == "call_module")
    for node in list(network.graph.nodes):
        node.meta["called_again"] = calls[node.target] > 1
        module = _module_for(node)
        if module is not None:
            replace_node_(network, node, module)
    for node in list(network.graph.nodes):
        layer = layer_of(network, node)
        if isinstance(layer, (_DropoutNd, nn.Identity)) and not has_hooks(layer):
            replace_node_(network, node, None)
    network.graph.eliminate_dead_code()  # What asked for the sizes of tensors to flatten.
    return network


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (StochasticModule, UnitScale)):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _graph_of(model: nn.Module, given: Collection[str]) -> fx.Graph:
    """The graph, without the arguments that keep their defaults.

    As inputs of the graph they would not be what they are: `argument is None` would be false.
    """
    parameters = inspect.signature(model.forward).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in given and isinstance(parameter.default, (bool, int, float, str, NoneType))
    }
    graph = _Tracer().trace(model, concrete_args=defaults or None)
    for node in list(graph.nodes):
        # torch.fx asserts that they have their defaults, as inputs of names that end in a number.
        if node.op == "placeholder" and node.target.lstrip("*") not in parameters:
            _erase_with_users_(graph, node)
    return graph


def _erase_with_users_(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase_with_users_(graph, user)
    graph.erase_node(node)


def _changes_what_others_read(network: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node changes in place what is read after it, or may be read through a view."""
    reader, changed = node, _changed_in_place(network, node)
    while changed is not None:
        others = [user for user in changed.users if user is not reader and not _reads_size(user)]
        if any(node < other or _may_be_view(network, other) for other in others):
            return True
        is_view = _may_be_view(network, changed)
        reader, changed = changed, changed.all_input_nodes[0] if is_view else None
    return False


def _may_be_view(network: fx.GraphModule, node: fx.Node) -> bool:
    """Whether what a node puts out may be the memory of its input."""
    if not node.all_input_nodes:
        return False
    if isinstance(layer_of(network, node), (nn.Flatten, nn.Unflatten, nn.Identity, _DropoutNd)):
        return True
    return node.op != "call_module" and getattr(node.target, "__name__", node.target) in _VIEWS


def _reads_size(node: fx.Node) -> bool:
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1] == "shape")


def _changed_in_place(network: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The node whose output another one changes, if it does."""
    if not node.all_input_nodes:
        return None
    output = node.kwargs.get("out")
    if isinstance(output, fx.Node):
        return output
    by_name = node.op == "call_method" and str(node.target).endswith("_")
    by_name |= node.op == "call_function" and getattr(node.target, "__name__", "").endswith("_")
    _, *names = _FUNCTIONS.get(node.target, (None,))
    options = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    by_option = options.get("inplace") or getattr(layer_of(network, node), "inplace", False)
    in_place = by_name or by_option or node.target in _IN_PLACE
    return node.all_input_nodes[0] if in_place else None


def _module_for(node: fx.Node) -> nn.Module | None:
    """The module that does what a call of a function does, if one is known."""
    if node.op not in ("call_function", "call_method"):
        return None  # Not a module or an input that has the name of a function.
    if _is_flatten(node):
        return nn.Flatten()
    if node.target is F.dropout:
        training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
        return nn.Identity() if training is False else None
    if node.target not in _FUNCTIONS:
        return None
    kind, *names = _FUNCTIONS[node.target]
    options = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    options.pop("inplace", None)  # trace() has seen to it that this makes no difference.
    if "input" in options or any(isinstance(value, fx.Node) for value in options.values()):
        return None
    return kind(**options)


def _is_flatten(node: fx.Node) -> bool:
    if node.target is torch.flatten or node.target == "flatten":
        start = node.kwargs.get("start_dim", node.args[1] if len(node.args) > 1 else 0)
        end = node.kwargs.get("end_dim", node.args[2] if len(node.args) > 2 else -1)
        return (start, end) == (1, -1)
    if node.target not in ("view", "reshape") or len(node.args) != 3 or node.args[2] != -1:
        return False
    source, size = node.args[0], node.args[1]
    return isinstance(size, fx.Node) and _is_batch_size(size, source)


def _is_batch_size(size: fx.Node, source: Any) -> bool:
    """x.size(0), x.size()[0] or x.shape[0]."""
    if size.target == "size":
        return size.args[0] is source and (size.args[1:] or (size.kwargs.get("dim"),)) == (0,)
    if size.target is operator.getitem and size.args[1] == 0:
        whole: Any = size.args[0]
        is_shape = whole.target is getattr and whole.args[1] == "shape"
        return (is_shape or whole.target == "size") and whole.args[0] is source
    return False


def _method(function: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy(
        "call_function", function, (self, other), {}
    )


_IN_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
}
# torch.fx takes x += y for x + y and does not show that it works in place.
_Proxy = type("_Proxy", (fx.Proxy,), {f"__{f.__name__}__": _method(f) for f in _IN_PLACE})
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
_POOL = ("kernel_size", "stride", "padding")
_FUNCTIONS: dict[Any, tuple[Any, ...]] = {
    F.relu: (nn.ReLU, "inplace"),
    torch.relu: (nn.ReLU,),
    "relu": (nn.ReLU,),
    F.tanh: (nn.Tanh,),
    torch.tanh: (nn.Tanh,),
    "tanh": (nn.Tanh,),
    F.sigmoid: (nn.Sigmoid,),
    torch.sigmoid: (nn.Sigmoid,),
    "sigmoid": (nn.Sigmoid,),
    F.leaky_relu: (nn.LeakyReLU, "negative_slope", "inplace"),
    F.elu: (nn.ELU, "alpha", "inplace"),
    F.gelu: (nn.GELU,),
    F.silu: (nn.SiLU, "inplace"),
    F.softplus: (nn.Softplus, "beta", "threshold"),
    F.max_pool2d: (nn.MaxPool2d, *_POOL, "dilation", "ceil_mode", "return_indices"),
    F.avg_pool2d: (nn.AvgPool2d, *_POOL, "ceil_mode", "count_include_pad", "divisor_override"),
    F.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, "output_size"),
}
