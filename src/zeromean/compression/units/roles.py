"""What each node of a network does to the units that pass through it."""

from __future__ import annotations

import operator
from enum import Enum, auto
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeromean.compression.graph.edit import layer_of, obstacle
from zeromean.compression.modules.adapters import RequireDim
from zeromean.compression.units.states import bundle_of, states_read
from zeromean.layers.dropout.unit_noise import UnitScale
from zeromean.layers.embedding import Embedding
from zeromean.layers.stochastic_layer import StochasticLayer


class Role(Enum):
    """What a node does to the units of its input."""

    AFFINE = auto()
    """A linear layer or a convolution: makes units of its own."""
    DEPTHWISE = auto()
    """A convolution of every channel by itself."""
    GROUPED = auto()
    """A convolution of groups of channels, whose units cannot go one by one."""
    EMBEDDING = auto()
    RECURRENT = auto()
    """LSTM or GRU (see `states.py` and `recurrence.py`)."""
    BUNDLE = auto()
    """The last states of a recurrent layer, all together."""
    STATES = auto()
    """Picks the output of a recurrent layer, or a last state."""
    POINTWISE = auto()
    NORM = auto()
    """BatchNorm with running statistics."""
    SCALE = auto()
    """A multiplier for each unit."""
    RESAMPLE = auto()
    """Maxima over windows, or interpolation: what is constant stays so."""
    AVERAGE_POOL = auto()
    FLATTEN = auto()
    """(N, C, *) to (N, F): every unit becomes as many as it has positions."""
    REARRANGE = auto()
    """Picks, reduces or permutes positions (see `layout.py`)."""
    COMBINE = auto()
    """A sum, difference, product, maximum or minimum of two activations."""
    CAT = auto()
    OTHER = auto()
    """Unknown: reads everything and tells nothing."""


def role_of(network: fx.GraphModule, node: fx.Node) -> Role:
    """What a node does to the units that it reads, as far as removing some is concerned."""
    layer = layer_of(network, node)
    if layer is None:
        return _role_of_call(network, node)
    return Role.OTHER if obstacle(network, node) else _role_of_layer(layer)


def is_pointwise(layer: Any) -> bool:
    """Whether a module does the same to every number."""
    return type(layer) in POINTWISE or (type(layer) is nn.PReLU and layer.num_parameters == 1)


def unit_sources(network: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The nodes whose units a node reads: for what picks a last state, the recurrent layer.

    All last states together have none that could go one by one: they are a block for each layer
    and direction.
    """
    if role_of(network, node) is not Role.STATES:
        return node.all_input_nodes
    return [bundle_of(network, source) or source for source in node.all_input_nodes]


def features_behind(network: fx.GraphModule, node: fx.Node) -> int | None:
    """How many features a node must have, or a layer further on would refuse them."""
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


def concatenated_dim(node: fx.Node) -> Any:
    """Along which dimension a node concatenates."""
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)


def _role_of_layer(layer: Any) -> Role:
    if isinstance(layer, StochasticLayer) and layer.weight.has_mean:
        return Role.OTHER
    if isinstance(layer, Embedding):
        return Role.EMBEDDING
    if isinstance(layer, StochasticLayer) or type(layer) in _AFFINE:
        if getattr(layer, "groups", 1) == 1:
            return Role.AFFINE
        alone = layer.groups == layer.in_channels and not layer.transposed
        return Role.DEPTHWISE if alone else Role.GROUPED
    if isinstance(layer, _BatchNorm):
        return Role.NORM if layer.running_mean is not None else Role.OTHER
    if isinstance(layer, nn.Flatten):
        known = {(1, -1): Role.FLATTEN, (0, -2): Role.REARRANGE}
        return known.get((layer.start_dim, layer.end_dim), Role.OTHER)
    if type(layer) is nn.Embedding:
        return Role.EMBEDDING if layer.max_norm is None else Role.OTHER
    if type(layer) in (nn.LSTM, nn.GRU):
        return Role.RECURRENT if layer.proj_size == 0 else Role.OTHER
    if isinstance(layer, UnitScale):
        return Role.SCALE
    if isinstance(layer, RequireDim):
        return Role.REARRANGE
    if is_pointwise(layer):
        return Role.POINTWISE
    if type(layer) in _RESAMPLING:
        return Role.OTHER if getattr(layer, "return_indices", False) else Role.RESAMPLE
    return Role.AVERAGE_POOL if type(layer) in _AVERAGE_POOLS else Role.OTHER


def _role_of_call(network: fx.GraphModule, node: fx.Node) -> Role:
    if node.op not in ("call_function", "call_method"):
        return Role.OTHER
    if bundle_of(network, node) is not None:
        return Role.BUNDLE
    if states_read(network, node) is not None:
        return Role.STATES
    number = len(node.all_input_nodes)
    if node.target in _CONCATENATIONS:
        parts = node.args[0] if node.args else ()
        return Role.CAT if isinstance(parts, (list, tuple)) and len(parts) == number else Role.OTHER
    if number == 1 and node.target in POINTWISE_CALLS:
        return Role.POINTWISE
    if number == 1 and node.target in REARRANGING:
        return Role.REARRANGE
    two = number == len(node.args) == 2 and not node.kwargs
    return Role.COMBINE if two and node.target in _COMBINATIONS else Role.OTHER


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
# Of one tensor and numbers, or of a tensor and itself.
POINTWISE_CALLS = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.neg,
    operator.pow,
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.abs,
    torch.exp,
    torch.square,
    torch.clamp,
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "pow",
    "abs",
    "exp",
    "square",
    "clamp",
    "contiguous",
    "clone",
    "detach",
}
REARRANGING = {
    operator.getitem,
    torch.flatten,
    torch.mean,
    torch.sum,
    torch.amax,
    torch.transpose,
    torch.permute,
    "flatten",
    "mean",
    "sum",
    "amax",
    "transpose",
    "permute",
}
_CONCATENATIONS = {torch.cat, torch.concat, torch.concatenate}
PRODUCTS = {operator.mul, torch.mul, "mul", "mul_"}
_COMBINATIONS = PRODUCTS | {
    operator.add,
    operator.sub,
    torch.add,
    torch.sub,
    torch.maximum,
    torch.minimum,
    "add",
    "add_",
    "sub",
    "sub_",
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
_RESAMPLING = {
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.Upsample,
    nn.UpsamplingNearest2d,
    nn.UpsamplingBilinear2d,
}
_AVERAGE_POOLS = {
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
}
