"""torch's own layers with weights that are not random: products, convolutions, normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.moments.arithmetic import product
from zeromean.moments.random_tensor import RandomTensor
from zeromean.moments.rules import NoRuleError, register
from zeromean.moments.weights import of_fixed_weight
from zeromean.samplers.linear_maps import Convolution, Dense


@register(F.linear)
def _linear(x: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, RandomTensor) or not isinstance(x, RandomTensor):
        result = product(x, weight.mT)
        return result if bias is None else result + bias
    return of_fixed_weight(Dense(), x, weight, bias)


def _convolution(num_dims: int, transposed: bool) -> Any:
    def spread(value: Any) -> tuple[int, ...]:
        given = tuple(value) if isinstance(value, Sequence) else (value,)
        return given * (num_dims // len(given))

    def plain(
        x: Any,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        strides, dilations = spread(stride), spread(dilation)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            total = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
            sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
            x, padding = F.pad(x, sides), 0
        op = Convolution(strides, spread(padding), dilations, groups)
        return _on_batch(op, x, weight, bias, num_dims)

    def backwards(
        x: RandomTensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        further = (groups, True, spread(output_padding))
        op = Convolution(spread(stride), spread(padding), spread(dilation), *further)
        return _on_batch(op, x, weight, bias, num_dims)

    return backwards if transposed else plain


def _on_batch(
    op: Convolution, x: RandomTensor, weight: Tensor, bias: Tensor | None, num_dims: int
) -> Tensor:
    if x.dim() == num_dims + 1:
        return of_fixed_weight(op, x.unsqueeze(0), weight, bias).squeeze(0)  # pyright: ignore
    return of_fixed_weight(op, x, weight, bias)


for _dims, _plain, _transposed in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    register(_plain)(_convolution(_dims, transposed=False))
    register(_transposed)(_convolution(_dims, transposed=True))


@register(F.batch_norm)
def _batch_norm(
    x: RandomTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        raise NoRuleError(
            "BatchNorm takes its statistics from the batch here, which are random themselves; put "
            "it into eval mode (and give it running statistics), or use method='samples'."
        )
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale
    shift = shift if bias is None else shift + bias
    shape = (-1, *[1] * (x.dim() - 2))
    return x * scale.view(shape) + shift.view(shape)


@register(F.layer_norm, torch.layer_norm)
def _layer_norm(
    x: RandomTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    mean, variance = x.moments()
    dims = tuple(range(-len(normalized_shape), 0))
    mean, variance = _normalized(mean, variance, dims, eps)
    if weight is not None:
        mean, variance = mean * weight, variance * weight.square()
    return RandomTensor(mean if bias is None else mean + bias, variance)


@register(F.group_norm, torch.group_norm)
def _group_norm(
    x: RandomTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    mean, variance = (part.unflatten(1, (num_groups, -1)) for part in x.moments())
    dims = tuple(range(2, mean.dim()))
    mean, variance = (part.flatten(1, 2) for part in _normalized(mean, variance, dims, eps))
    shape = (-1, *[1] * (mean.dim() - 2))
    if weight is not None:
        mean, variance = mean * weight.view(shape), variance * weight.square().view(shape)
    return RandomTensor(mean if bias is None else mean + bias.view(shape), variance)


def _normalized(
    mean: Tensor, variance: Tensor, dims: tuple[int, ...], eps: float
) -> tuple[Tensor, Tensor]:
    """Divided by the root of the expected square, as if that did not vary.

    That the mean over the features moves with each of them is taken into account.
    """
    centred = mean - mean.mean(dims, keepdim=True)
    number = max(mean.numel() // max(mean.mean(dims).numel(), 1), 1)
    average = variance.mean(dims, keepdim=True)
    square = centred.square().mean(dims, keepdim=True) + average * (1 - 1 / number)
    inverse = (square + eps).rsqrt()
    spread = variance * (1 - 2 / number) + average / number
    return centred * inverse, spread.clamp_min(0) * inverse.square()
