"""Functions and methods that do what a module does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.node import map_arg


def module_for(node: fx.Node) -> nn.Module | None:
    """The module that does what the call of a function does, if one is known.

    It does not work in place.
    """
    if node.op not in ("call_function", "call_method"):
        return None  # Not a module or an input that has the name of a function.
    if node.target is torch.flatten or node.target == "flatten":
        start = node.kwargs.get("start_dim", node.args[1] if len(node.args) > 1 else 0)
        end = node.kwargs.get("end_dim", node.args[2] if len(node.args) > 2 else -1)
        return nn.Flatten() if (start, end) == (1, -1) else None
    if node.target is F.dropout:
        training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
        return nn.Identity() if training is False else None
    if node.target not in _FUNCTIONS:
        return None
    options = options_of(node)
    options.pop("inplace", None)
    computed: list[fx.Node] = []
    map_arg(options, computed.append)
    if "input" in options or computed:
        return None
    return _FUNCTIONS[node.target][0](**options)


def options_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call but the first, by the names that a module has for them."""
    _, *names = _FUNCTIONS.get(node.target, (None,))
    return {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}


def _upsample(
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> nn.Module | None:
    if antialias:
        return None
    return nn.Upsample(size, scale_factor, mode, align_corners, recompute_scale_factor)


_POOL = ("kernel_size", "stride", "padding")
_MAX_POOL = (*_POOL, "dilation", "ceil_mode", "return_indices")
_AVERAGE_POOL = (*_POOL, "ceil_mode", "count_include_pad")
_FUNCTIONS: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((torch.relu, torch.relu_, F.relu_, "relu", "relu_"), (nn.ReLU,)),
    **dict.fromkeys((F.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"), (nn.Tanh,)),
    **dict.fromkeys(
        (F.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"), (nn.Sigmoid,)
    ),
    F.relu: (nn.ReLU, "inplace"),
    F.relu6: (nn.ReLU6, "inplace"),
    F.leaky_relu: (nn.LeakyReLU, "negative_slope", "inplace"),
    F.elu: (nn.ELU, "alpha", "inplace"),
    F.selu: (nn.SELU, "inplace"),
    F.celu: (nn.CELU, "alpha", "inplace"),
    F.gelu: (nn.GELU,),
    F.silu: (nn.SiLU, "inplace"),
    F.mish: (nn.Mish, "inplace"),
    F.softplus: (nn.Softplus, "beta", "threshold"),
    F.softsign: (nn.Softsign,),
    F.hardtanh: (nn.Hardtanh, "min_val", "max_val", "inplace"),
    F.hardswish: (nn.Hardswish, "inplace"),
    F.hardsigmoid: (nn.Hardsigmoid, "inplace"),
    F.logsigmoid: (nn.LogSigmoid,),
    F.max_pool1d: (nn.MaxPool1d, *_MAX_POOL),
    F.max_pool2d: (nn.MaxPool2d, *_MAX_POOL),
    F.max_pool3d: (nn.MaxPool3d, *_MAX_POOL),
    F.avg_pool1d: (nn.AvgPool1d, *_AVERAGE_POOL),
    F.avg_pool2d: (nn.AvgPool2d, *_AVERAGE_POOL, "divisor_override"),
    F.avg_pool3d: (nn.AvgPool3d, *_AVERAGE_POOL, "divisor_override"),
    F.adaptive_avg_pool1d: (nn.AdaptiveAvgPool1d, "output_size"),
    F.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, "output_size"),
    F.adaptive_avg_pool3d: (nn.AdaptiveAvgPool3d, "output_size"),
    F.adaptive_max_pool2d: (nn.AdaptiveMaxPool2d, "output_size", "return_indices"),
    F.interpolate: (_upsample, "size", "scale_factor", "mode", "align_corners"),
}
