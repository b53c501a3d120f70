"""Maxima, by Clark's formula for two normal variables, and averages over windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.functional.normal_moments import maximum
from zeromean.moments.random_tensor import RandomTensor
from zeromean.moments.rules import NoRuleError, register

Moments = tuple[Tensor, Tensor]


def _max_pool(num_dims: int) -> Callable[..., Tensor]:
    def rule(
        x: RandomTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor:
        if return_indices:
            raise NoRuleError(
                "Which element of a window is the largest is random, so that max pooling with "
                "return_indices=True has no moments; use method='samples'."
            )
        if x.increasing is not None:
            # The largest of increasing functions is that of the largest, which is closer to normal
            # before the function, and fewer elements go through it.
            function, source = x.increasing
            pooled = rule(source, kernel_size, stride, padding, dilation, ceil_mode)
            assert isinstance(pooled, RandomTensor)
            return RandomTensor.increasing_of(function, pooled)
        moments = x.moments()
        kernels, dilations = _each(kernel_size, num_dims), _each(dilation, num_dims)
        strides = kernels if stride is None or stride == [] else _each(stride, num_dims)
        settings = zip(kernels, strides, _each(padding, num_dims), dilations, strict=True)
        for dim, window in zip(range(-1, -num_dims - 1, -1), reversed(list(settings)), strict=True):
            moments = _largest_along(moments, dim, *window, ceil_mode)
        return RandomTensor(*moments)

    return rule


def _largest_along(
    moments: Moments, dim: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> Moments:
    """Maxima over windows along one dimension; those over several are maxima of maxima."""
    length = moments[0].shape[dim]
    span = dilation * (kernel - 1) + 1
    room = length + 2 * padding - span
    count = (-(-room // stride) if ceil else room // stride) + 1
    if ceil and (count - 1) * stride >= length + padding:
        count -= 1  # As torch: no window begins in the padding behind.
    behind = max((count - 1) * stride + span - length - padding, 0)
    if padding or behind:
        moments = _padded(moments, dim, padding, behind)
    last = (count - 1) * stride + 1
    index: list[Any] = [slice(None)] * moments[0].dim()
    parts: list[Moments] = []
    for place in range(0, span, dilation):
        index[dim] = slice(place, place + last, stride)
        parts.append((moments[0][tuple(index)], moments[1][tuple(index)]))
    return _largest(parts)


def _largest(parts: list[Moments]) -> Moments:
    """In pairs, and pairs of pairs: as few roundings to a normal as there can be."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        rest = parts[-1:] if len(parts) % 2 else []
        parts = [maximum(*one, *other) for one, other in pairs] + rest
    return parts[0]


def _padded(moments: Moments, dim: int, before: int, behind: int) -> Moments:
    """With elements around that are never the largest."""
    mean, variance = moments
    low = mean.detach().amin() - 20 * variance.detach().amax().sqrt() - 1
    sides = [0, 0] * (-dim - 1) + [before, behind]
    padded = F.pad(mean - low, sides) + low
    return padded, F.pad(variance, sides)


def _average_pool(num_dims: int) -> Callable[..., Tensor]:
    pool: Any = (F.avg_pool2d, F.avg_pool3d)[num_dims - 2]

    def rule(
        x: RandomTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        mean, variance = x.moments()
        window = (kernel_size, stride, padding, ceil_mode)
        options = (*window, count_include_pad, divisor_override)
        # Σv / d² is the average of the variances over the divisor d once more.
        ones = torch.ones_like(mean[:1])
        share = pool(ones, *options) / pool(ones, *window, True, 1)
        return RandomTensor(pool(mean, *options), pool(variance, *options) * share)

    return rule


@register(F.avg_pool1d)
def _average_pool_1d(
    x: RandomTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    kernel, padded = _each(kernel_size, 1), _each(padding, 1)
    strides = kernel if stride is None or stride == () else _each(stride, 1)
    image: Any = x.unsqueeze(-2)
    options = ((1, *kernel), (1, *strides), (0, *padded), ceil_mode, count_include_pad)
    return F.avg_pool2d(image, *options).squeeze(-2)


def _adaptive_average_pool(num_dims: int) -> Callable[..., Tensor]:
    pools: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
    pool = pools[num_dims - 1]

    def rule(x: RandomTensor, output_size: Any) -> Tensor:
        mean, variance = x.moments()
        average, spread = pool(mean, output_size), pool(variance, output_size)
        for dim in range(-num_dims, 0):
            sizes = _window_sizes(mean.shape[dim], average.shape[dim])
            shape = (-1, *[1] * (-dim - 1))
            spread = spread / torch.tensor(sizes, device=mean.device).to(mean).view(shape)
        return RandomTensor(average, spread)

    return rule


def _adaptive_max_pool(num_dims: int) -> Callable[..., Tensor]:
    def rule(x: RandomTensor, output_size: Any, return_indices: bool = False) -> Tensor:
        sizes = [x.shape[d] if s is None else s for d, s in _by_dim(output_size, num_dims)]
        if return_indices or any(x.shape[d] % s for d, s in _by_dim(sizes, num_dims)):
            raise NoRuleError(
                "Moments of adaptive max pooling need an output size that divides the input's, and "
                f"no indices, got {tuple(x.shape)} to {output_size}; use method='samples'."
            )
        windows = [x.shape[d] // s for d, s in _by_dim(sizes, num_dims)]
        return _MAX_POOLS[num_dims](x, windows)

    return rule


def _by_dim(sizes: Any, num_dims: int) -> list[tuple[int, Any]]:
    given = sizes if isinstance(sizes, Sequence) else [sizes] * num_dims
    return list(zip(range(-num_dims, 0), given, strict=True))


def _window_sizes(length: int, count: int) -> list[int]:
    return [-(-(i + 1) * length // count) - i * length // count for i in range(count)]


def _each(value: Any, num_dims: int) -> tuple[int, ...]:
    given = tuple(value) if isinstance(value, Sequence) else (value,)
    return given * (num_dims // len(given))


@register(torch.amax, Tensor.amax)
def _amax(x: RandomTensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """The largest along dimensions, one after the other."""
    dims = dim if isinstance(dim, Sequence) else (dim,)
    moments = x.moments()
    for one in sorted((d % x.dim() for d in dims or range(x.dim())), reverse=True):
        parts = zip(*(part.unbind(one) for part in moments), strict=True)
        moments = _largest(list(parts))
        if keepdim:
            moments = (moments[0].unsqueeze(one), moments[1].unsqueeze(one))
    return RandomTensor(*moments)


@register(torch.maximum, Tensor.maximum)
def _maximum(x: Any, other: Any) -> Tensor:
    pairs = [p.moments() if isinstance(p, RandomTensor) else (p, p * 0) for p in (x, other)]
    mean, variance, *others = torch.broadcast_tensors(*pairs[0], *pairs[1])
    return RandomTensor(*maximum(mean, variance, *others))


_MAX_POOLS = {num_dims: _max_pool(num_dims) for num_dims in (1, 2, 3)}
# F's pooling functions hand over those of torch that they call, or themselves.
for _dims, _calls in {
    1: (F.max_pool1d, torch.max_pool1d, F.max_pool1d_with_indices),
    2: (F.max_pool2d, torch.max_pool2d, F.max_pool2d_with_indices),
    3: (F.max_pool3d, torch.max_pool3d, F.max_pool3d_with_indices),
}.items():
    register(*_calls)(_MAX_POOLS[_dims])
register(F.avg_pool2d)(_average_pool(2))
register(F.avg_pool3d)(_average_pool(3))
for _dims, _calls in {
    1: (F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d),
    2: (F.adaptive_avg_pool2d,),
    3: (F.adaptive_avg_pool3d,),
}.items():
    register(*_calls)(_adaptive_average_pool(_dims))
for _dims, _calls in {
    1: (F.adaptive_max_pool1d, torch.adaptive_max_pool1d, F.adaptive_max_pool1d_with_indices),
    2: (F.adaptive_max_pool2d, F.adaptive_max_pool2d_with_indices),
    3: (F.adaptive_max_pool3d, F.adaptive_max_pool3d_with_indices),
}.items():
    register(*_calls)(_adaptive_max_pool(_dims))
