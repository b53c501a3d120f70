"""The operations that `zm.compress` understands: each is one entry of one table.

An entry says which modules and which functions do it, and what it does to units. Whatever is not
here is left alone: it reads everything and tells nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from zeromean.compression.graph.roles import Role
from zeromean.compression.modules.adapters import RequireDim
from zeromean.layers.dropout.unit_noise import UnitScale
from zeromean.layers.stochastic_layer import StochasticLayer


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Something that networks compute.

    Attributes:
        modules: Modules that do it.
        role: What they do to units; a function of the module, where its settings decide.
        subclasses: Whether subclasses of the modules do the same.
        calls: Functions, and names of methods of tensors, that do it. Where there are modules,
            `trace` puts them in place of calls.
        options: The arguments of the calls but the first, as the module names them.
        build: The module for these options, None where there is none; default: the first module.
        of_one: What calls do to the units of one activation, as far as no module stands for them.
        of_two: What they do to those of two.
        of_list: What they do to those of a list.
        in_place: The operator that does it in place.
        homogeneous: Whether a positive multiplier of a unit may as well stand in front.
        product: Whether zero times anything, NaN included, counts as zero.
        view: Whether the output may be the memory of the input.
    """

    modules: tuple[type[nn.Module], ...] = ()
    role: Role | Callable[[Any], Role] = Role.OTHER
    subclasses: bool = False
    calls: tuple[Callable[..., Any] | str, ...] = ()
    options: tuple[str, ...] = ()
    build: Callable[..., nn.Module | None] | None = None
    of_one: Role = Role.OTHER
    of_two: Role = Role.OTHER
    of_list: Role = Role.OTHER
    in_place: Callable[..., Any] | None = None
    homogeneous: bool = False
    product: bool = False
    view: bool = False


def operation_of(layer: Any) -> Operation | None:
    """What a module computes; of a stochastic layer, what its twin in torch does."""
    if isinstance(layer, StochasticLayer):
        return _BY_MODULE.get(getattr(layer, "torch_twin", None))
    for kind in type(layer).__mro__:
        found = _BY_MODULE.get(kind)
        if found is not None:
            return found if found.subclasses or kind is type(layer) else None
    return None


def operation_called(target: Any) -> Operation | None:
    """What a function, or the method of this name, computes."""
    return _BY_CALL.get(target)


def role_of(layer: Any) -> Role:
    """What a module does to units."""
    operation = operation_of(layer)
    if operation is None or (isinstance(layer, StochasticLayer) and layer.weight.has_mean):
        return Role.OTHER
    return operation.role if isinstance(operation.role, Role) else operation.role(layer)


def _convolution(layer: Any) -> Role:
    if layer.groups == 1:
        return Role.AFFINE
    alone = layer.groups == layer.in_channels and not layer.transposed
    return Role.DEPTHWISE if alone else Role.GROUPED


def _flatten(layer: Any) -> Role:
    known = {(1, -1): Role.FLATTEN, (0, -2): Role.MERGE}
    return known.get((layer.start_dim, layer.end_dim), Role.OTHER)


def _only_if(role: Role, condition: Callable[[Any], bool]) -> Callable[[Any], Role]:
    return lambda layer: role if condition(layer) else Role.OTHER


def _build_flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module | None:
    return nn.Flatten() if (start_dim, end_dim) == (1, -1) else None


def _build_dropout(p: float = 0.5, training: bool = True) -> nn.Module | None:
    return nn.Identity() if training is False else None


def _build_upsample(
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


def _pointwise(
    module: type[nn.Module], *calls: Any, options: tuple[str, ...] = (), homogeneous: bool = False
) -> Operation:
    """An activation function."""
    return Operation(
        modules=(module,),
        role=Role.POINTWISE,
        calls=calls,
        options=options,
        homogeneous=homogeneous,
    )


def _pool(module: type[nn.Module], call: Any, *options: str, average: bool = False) -> Operation:
    picks = _only_if(Role.RESAMPLE, lambda layer: not layer.return_indices)
    role = Role.AVERAGE_POOL if average else picks
    calls = () if call is None else (call,)
    return Operation(modules=(module,), role=role, calls=calls, options=options, homogeneous=True)


def _sum_or_product(*calls: Any, in_place: Any, product: bool = False) -> Operation:
    return Operation(
        calls=calls, in_place=in_place, of_one=Role.POINTWISE, of_two=Role.COMBINE, product=product
    )


_POOL = ("kernel_size", "stride", "padding")
_MAX = (*_POOL, "dilation", "ceil_mode", "return_indices")
_AVERAGE = (*_POOL, "ceil_mode", "count_include_pad")

OPERATIONS = (
    # Layers.
    Operation(modules=(nn.Linear,), role=Role.AFFINE),
    Operation(
        modules=(
            *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
            *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        ),
        role=_convolution,
    ),
    Operation(
        modules=(nn.Embedding,),
        role=_only_if(Role.EMBEDDING, lambda layer: getattr(layer, "max_norm", None) is None),
    ),
    Operation(
        modules=(nn.LSTM, nn.GRU),
        role=_only_if(Role.RECURRENT, lambda layer: layer.proj_size == 0),
    ),
    Operation(
        modules=(_BatchNorm,),
        subclasses=True,
        role=_only_if(Role.NORM, lambda layer: layer.running_mean is not None),
    ),
    Operation(modules=(UnitScale,), subclasses=True, role=Role.SCALE),
    # Activation functions.
    _pointwise(
        nn.ReLU,
        *(F.relu, torch.relu, torch.relu_, "relu", "relu_"),
        options=("inplace",),
        homogeneous=True,
    ),
    _pointwise(nn.Tanh, F.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"),
    _pointwise(nn.Sigmoid, F.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"),
    _pointwise(nn.ReLU6, F.relu6, options=("inplace",)),
    _pointwise(nn.LeakyReLU, F.leaky_relu, options=("negative_slope", "inplace"), homogeneous=True),
    _pointwise(nn.ELU, F.elu, options=("alpha", "inplace")),
    _pointwise(nn.SELU, F.selu, options=("inplace",)),
    _pointwise(nn.CELU, F.celu, options=("alpha", "inplace")),
    _pointwise(nn.GELU, F.gelu),
    _pointwise(nn.SiLU, F.silu, options=("inplace",)),
    _pointwise(nn.Mish, F.mish, options=("inplace",)),
    _pointwise(nn.Softplus, F.softplus, options=("beta", "threshold")),
    _pointwise(nn.Softsign, F.softsign),
    _pointwise(nn.Hardtanh, F.hardtanh, options=("min_val", "max_val", "inplace")),
    _pointwise(nn.Hardswish, F.hardswish, options=("inplace",)),
    _pointwise(nn.Hardsigmoid, F.hardsigmoid, options=("inplace",)),
    _pointwise(nn.LogSigmoid, F.logsigmoid),
    Operation(
        modules=(nn.PReLU,),
        role=_only_if(Role.POINTWISE, lambda layer: layer.num_parameters == 1),
    ),
    # Windows of positions.
    _pool(nn.MaxPool1d, F.max_pool1d, *_MAX),
    _pool(nn.MaxPool2d, F.max_pool2d, *_MAX),
    _pool(nn.MaxPool3d, F.max_pool3d, *_MAX),
    _pool(nn.AdaptiveMaxPool1d, None),
    _pool(nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d, "output_size", "return_indices"),
    _pool(nn.AdaptiveMaxPool3d, None),
    _pool(nn.AvgPool1d, F.avg_pool1d, *_AVERAGE, average=True),
    _pool(nn.AvgPool2d, F.avg_pool2d, *_AVERAGE, "divisor_override", average=True),
    _pool(nn.AvgPool3d, F.avg_pool3d, *_AVERAGE, "divisor_override", average=True),
    _pool(nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d, "output_size", average=True),
    _pool(nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d, "output_size", average=True),
    _pool(nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d, "output_size", average=True),
    Operation(
        modules=(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
        role=Role.RESAMPLE,
        calls=(F.interpolate,),
        options=("size", "scale_factor", "mode", "align_corners"),
        build=_build_upsample,
        homogeneous=True,
    ),
    # Places of units.
    Operation(
        modules=(nn.Flatten,),
        role=_flatten,
        subclasses=True,
        calls=(torch.flatten, "flatten"),
        options=("start_dim", "end_dim"),
        build=_build_flatten,
        of_one=Role.JOIN,
        view=True,
    ),
    Operation(calls=(operator.getitem,), of_one=Role.PICK, view=True),
    Operation(calls=(torch.transpose, "transpose"), of_one=Role.TRANSPOSE, view=True),
    Operation(calls=(torch.permute, "permute"), of_one=Role.PERMUTE, view=True),
    Operation(calls=(torch.mean, "mean"), of_one=Role.REDUCE),
    Operation(calls=(torch.amax, "amax"), of_one=Role.REDUCE),
    Operation(calls=(torch.sum, "sum"), of_one=Role.SUM),
    Operation(calls=(torch.cat, torch.concat, torch.concatenate), of_list=Role.CAT),
    # Arithmetic: of one tensor and numbers or of a tensor and itself, or of two.
    _sum_or_product(operator.add, torch.add, "add", "add_", in_place=operator.iadd),
    _sum_or_product(operator.sub, torch.sub, "sub", "sub_", in_place=operator.isub),
    _sum_or_product(operator.mul, torch.mul, "mul", "mul_", in_place=operator.imul, product=True),
    Operation(calls=(torch.maximum,), of_two=Role.COMBINE),
    Operation(calls=(torch.minimum,), of_two=Role.COMBINE),
    Operation(
        calls=(operator.truediv, torch.div, "div"),
        in_place=operator.itruediv,
        of_one=Role.POINTWISE,
    ),
    Operation(calls=(operator.pow, "pow"), in_place=operator.ipow, of_one=Role.POINTWISE),
    Operation(calls=(operator.neg, "neg"), of_one=Role.POINTWISE),
    Operation(calls=(torch.abs, "abs"), of_one=Role.POINTWISE),
    Operation(calls=(torch.exp, "exp"), of_one=Role.POINTWISE),
    Operation(calls=(torch.square, "square"), of_one=Role.POINTWISE),
    Operation(calls=(torch.clamp, "clamp"), of_one=Role.POINTWISE),
    Operation(calls=("clone",), of_one=Role.POINTWISE),
    Operation(calls=("contiguous", "detach"), of_one=Role.POINTWISE, view=True),
    # What changes nothing.
    Operation(modules=(RequireDim,), subclasses=True, role=Role.GUARD, view=True),
    Operation(
        modules=(nn.Identity, _DropoutNd),
        subclasses=True,
        role=Role.NOTHING,
        calls=(F.dropout,),
        options=("p", "training"),
        build=_build_dropout,
        view=True,
    ),
    # Of these it is only known whether their output shares the memory of their input.
    Operation(modules=(nn.Unflatten,), view=True),
    Operation(calls=(operator.floordiv,), in_place=operator.ifloordiv),
    Operation(calls=(operator.mod,), in_place=operator.imod),
    Operation(
        calls=(
            *("amin", "argmax", "cos", "log", "logsumexp", "norm", "prod", "rsqrt", "sin", "sqrt"),
            *("std", "var", "where", "stack", "einsum", "bmm", "baddbmm", "matmul", "mm"),
            *("linear", "conv1d", "conv2d", "conv3d", "embedding", "scaled_dot_product_attention"),
            *("batch_norm", "group_norm", "layer_norm", "normalize", "softmax", "log_softmax"),
        )
    ),
)

_BY_MODULE: dict[Any, Operation] = {kind: o for o in OPERATIONS for kind in o.modules}
_BY_CALL: dict[Any, Operation] = {call: o for o in OPERATIONS for call in o.calls}
# What operators that work in place do, apart from where they write.
IN_PLACE: dict[Any, Any] = {o.in_place: o.calls[0] for o in OPERATIONS if o.in_place is not None}
# Functions and methods whose output is always new memory. Those that work in place end in _.
NEW_MEMORY = {
    name
    for operation in OPERATIONS
    if not operation.view
    for call in operation.calls
    if not (name := getattr(call, "__name__", str(call))).endswith("_")
}
