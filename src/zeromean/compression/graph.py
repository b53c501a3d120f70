"""A network as a graph of modules, and what each of them does to the units that pass through it."""

from __future__ import annotations

import operator
from collections import Counter
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from zeromean.dropout import UnitScale
from zeromean.layers import Embedding, StochasticLayer
from zeromean.stochastic import StochasticModule


class Role(Enum):
    """What a node does to the units of its input."""

    AFFINE = auto()
    """A linear layer or a convolution: makes units of its own."""
    POINTWISE = auto()
    NORM = auto()
    """BatchNorm with running statistics."""
    SCALE = auto()
    """A multiplier for each unit."""
    MAX_POOL = auto()
    AVERAGE_POOL = auto()
    FLATTEN = auto()
    """(N, C, *) to (N, F): every unit becomes as many as it has positions."""
    ADD = auto()
    OTHER = auto()
    """Unknown: reads everything and tells nothing."""


def trace(model: nn.Module) -> fx.GraphModule:
    """The graph of a model in eval mode, with modules in place of known functions.

    Raises what torch.fx raises where a forward function depends on data, and ValueError where it
    changes activations in place that are read elsewhere: the graph would not show it.
    """
    if _Tracer().is_leaf_module(model, ""):
        model = nn.Sequential(model)
    network = fx.GraphModule(model, _Tracer().trace(model))
    for node in network.graph.nodes:
        if _works_in_place(network, node) and len(node.all_input_nodes[0].users) > 1:
            raise ValueError(f"{node} changes in place what something else reads too")
    calls = Counter(node.target for node in network.graph.nodes if node.op == "call_module")
    for node in list(network.graph.nodes):
        node.meta["called_again"] = calls[node.target] > 1
        module = _module_for(node)
        if module is not None:
            replace_node_(network, node, module)
    for node in list(network.graph.nodes):
        if isinstance(layer_of(network, node), (_DropoutNd, nn.Identity)):
            replace_node_(network, node, None)
    network.graph.eliminate_dead_code()  # What asked for the sizes of tensors to flatten.
    return network


def layer_of(network: fx.GraphModule, node: fx.Node) -> Any:
    """The module that a node calls, or None."""
    return network.get_submodule(str(node.target)) if node.op == "call_module" else None


def role_of(network: fx.GraphModule, node: fx.Node) -> Role:
    if node.target in _ADDITIONS and len(node.all_input_nodes) == len(node.args) == 2:
        return Role.ADD if not node.kwargs else Role.OTHER
    layer = layer_of(network, node)
    if layer is None or len(node.all_input_nodes) != 1 or len(node.args) != 1:
        return Role.OTHER
    if node.meta.get("called_again") and any(True for _ in layer.parameters()):
        return Role.OTHER  # Its inputs may differ in what is constant, and in who reads its output.
    if is_affine(layer):
        return Role.AFFINE
    if type(layer) in POINTWISE:
        return Role.POINTWISE
    if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
        return Role.NORM
    if isinstance(layer, UnitScale):
        return Role.SCALE
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
        return Role.FLATTEN
    if type(layer) in _MAX_POOLS and not layer.return_indices:
        return Role.MAX_POOL
    return Role.AVERAGE_POOL if type(layer) in _AVERAGE_POOLS else Role.OTHER


def is_affine(layer: Any) -> bool:
    """Whether a layer has units: a Linear or convolution, plain or with zero means."""
    if isinstance(layer, StochasticLayer):
        known = not isinstance(layer, Embedding) and not layer.weight.has_mean
    else:
        known = type(layer) in _AFFINE
    return known and getattr(layer, "groups", 1) == 1


def features_behind(network: fx.GraphModule, node: fx.Node) -> int | None:
    """How many features a Linear layer further on says that a node has."""
    for user in node.users:
        role, layer = role_of(network, user), layer_of(network, user)
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


def replace_node_(network: fx.GraphModule, node: fx.Node, module: nn.Module | None) -> None:
    """Let a node call another module on its input, or (None) pass its input on."""
    source = node.all_input_nodes[0]
    if module is None:
        node.replace_all_uses_with(source)
    else:
        node.replace_all_uses_with(insert_(network, node, module))
    network.graph.erase_node(node)


def insert_(
    network: fx.GraphModule, before: fx.Node, module: nn.Module, suffix: str = ""
) -> fx.Node:
    """Let a new node in front of another one call a module on the same input."""
    name = str(before.target) if before.op == "call_module" else before.name
    name = name.replace(".", "_").rstrip("_") + suffix
    while hasattr(network, name):
        name = f"{name}_"
    network.add_module(name, module)
    with network.graph.inserting_before(before):
        return network.graph.call_module(name, (before.all_input_nodes[0],))


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (StochasticModule, UnitScale)):
            return True
        return super().is_leaf_module(m, module_qualified_name)


def _works_in_place(network: fx.GraphModule, node: fx.Node) -> bool:
    if not node.all_input_nodes:
        return False
    by_name = node.op == "call_method" and str(node.target).endswith("_")
    by_name |= node.op == "call_function" and getattr(node.target, "__name__", "").endswith("_")
    _, *names = _FUNCTIONS.get(node.target, (None,))
    options = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    by_option = options.get("inplace") or getattr(layer_of(network, node), "inplace", False)
    return bool(by_name or by_option or node.target in (operator.iadd, operator.imul))


def _module_for(node: fx.Node) -> nn.Module | None:
    """The module that does what a call of a function does, if one is known."""
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


POINTWISE = {
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.LogSigmoid,
}
_AFFINE = {
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
}
_MAX_POOLS = {nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d}
_AVERAGE_POOLS = {
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
}
_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
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
