"""A network as a graph of modules, and what each of them does to the units that pass through it."""

from __future__ import annotations

import operator
from enum import Enum, auto
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeromean.dropout import UnitScale
from zeromean.layers import Embedding, StochasticLayer


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


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward function."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def layer_of(network: fx.GraphModule, node: fx.Node) -> Any:
    """The module that a node calls, or None."""
    return network.get_submodule(str(node.target)) if node.op == "call_module" else None


def role_of(network: fx.GraphModule, node: fx.Node) -> Role:
    layer = layer_of(network, node)
    if node.kwargs:
        return Role.OTHER
    if layer is None:
        adds = node.target in _ADDITIONS and len(node.all_input_nodes) == len(node.args) == 2
        return Role.ADD if adds else Role.OTHER
    if len(node.all_input_nodes) != 1 or len(node.args) != 1:
        return Role.OTHER
    if has_hooks(layer):
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
_ADDITIONS = {operator.add, torch.add, "add", "add_"}
