"""Activation functions of normal inputs.

Those that are linear in pieces have closed forms (`functional/normal_moments.py`). The smooth ones
are averaged over the nodes of a trapezoid rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import inf
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.functional.normal_moments import clipped, leaky_rectified, normal_cdf, rectified
from zeromean.moments.arithmetic import in_place
from zeromean.moments.random_tensor import Diagonal, RandomTensor
from zeromean.moments.rules import register

# torch's.
_LEAK = 0.01
# For more outputs, what goes together in front of an activation is forgotten: it costs by output.
_MOST_ROWS = 32


def elementwise(function: Callable[..., Tensor]) -> Callable[..., RandomTensor]:
    """The rule of a smooth function of each element by itself, for `zeromean.moments.register`.

    `register(torch.erf)(elementwise(torch.erf))`. The mean and the variance of the function are
    averages over 21 nodes: as many calls of the function.
    """

    def rule(x: RandomTensor, *args: Any, **kwargs: Any) -> RandomTensor:
        mean, variance = x.moments()
        kwargs.pop("inplace", None)
        std = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        # Around the value at the mean, so that the square of the mean takes no digits away.
        centre = function(mean, *args, **kwargs)
        first = second = torch.zeros_like(mean)
        for node, weight in _nodes():
            change = function(torch.add(mean, std, alpha=node), *args, **kwargs) - centre
            first = torch.add(first, change, alpha=weight)
            second = torch.addcmul(second, change, change, value=weight)
        return RandomTensor(centre + first, (second - first.square()).clamp_min(0))

    return rule


@lru_cache(maxsize=1)
def _nodes() -> list[tuple[float, float]]:
    """Nodes of the trapezoid rule for the standard normal and their weights, which sum to 1.

    Better than as many of Gauss and Hermite where the function turns within a standard deviation.
    """
    nodes = np.arange(-10, 11) * 0.5
    weights = np.exp(-np.square(nodes) / 2)
    return list(zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True))


def _increasing(
    of_moments: Callable[..., tuple[Tensor, Tensor]], *names: str, slope: float | str | None = None
) -> Callable[..., RandomTensor]:
    """The rule of an increasing function, from one of means and variances.

    Args:
        names: What the function calls the arguments behind its input.
        slope: Of one that is linear on both sides of 0 and the identity above: that below, or the
            name of the argument that it is. Then covariances go on.
    """

    def rule(x: RandomTensor, *args: Any, **kwargs: Any) -> RandomTensor:
        options = dict(zip(names, args, strict=False)) | kwargs
        writes = options.pop("inplace", False)

        def apply(y: RandomTensor) -> RandomTensor:
            return RandomTensor(*of_moments(*y.moments(), **options))

        source = x.copied() if writes else x
        below = options.get(slope, _LEAK) if isinstance(slope, str) else slope
        result = RandomTensor.increasing_of(apply, source)
        before = source.covariance_of
        if isinstance(before, Diagonal):
            result.covariance_of = lambda rows=None, /: Diagonal(result.moments()[1])(rows)
        elif below is not None and before is not None and source.dim() == 2:
            result.covariance_of = partial(_covariance_behind, source, result, below)
        return x.become_(result) if writes else result

    return rule


def _covariance_behind(
    x: RandomTensor, result: RandomTensor, below: float, rows: Tensor | None = None, /
) -> Tensor:
    """To first order: the covariance in front times the expected slopes of both."""
    mean, variance = x.moments()
    own = result.moments()[1]
    before = x.covariance_of
    if before is None or (rows is not None and rows.shape[-2] > _MOST_ROWS):
        return Diagonal(own)(rows)
    above = normal_cdf(mean / variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt())
    slopes = below + (1 - below) * above
    rest = Diagonal(own - variance * slopes.square())(rows)
    slopes = slopes.unsqueeze(-2)
    return rest + (before() * slopes * slopes.mT if rows is None else before(rows * slopes))


def _leaky(mean: Tensor, variance: Tensor, negative_slope: float = _LEAK) -> tuple[Tensor, Tensor]:
    return leaky_rectified(mean, variance, negative_slope)


def _hardtanh(
    mean: Tensor, variance: Tensor, min_val: float = -1.0, max_val: float = 1.0
) -> tuple[Tensor, Tensor]:
    return clipped(mean, variance, min_val, max_val)


def _clamp(
    mean: Tensor, variance: Tensor, min: float | None = None, max: float | None = None
) -> tuple[Tensor, Tensor]:
    return clipped(mean, variance, -inf if min is None else min, inf if max is None else max)


def _hardsigmoid(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    cut, spread = clipped(mean, variance, -3.0, 3.0)
    return cut / 6 + 0.5, spread / 36


_relu = _increasing(rectified, "inplace", slope=0.0)
register(F.relu, torch.relu, Tensor.relu)(_relu)
register(torch.relu_, Tensor.relu_)(partial(_relu, inplace=True))
register(F.leaky_relu)(_increasing(_leaky, "negative_slope", "inplace", slope="negative_slope"))
register(F.relu6)(_increasing(partial(_hardtanh, min_val=0.0, max_val=6.0), "inplace"))
register(F.hardtanh)(_increasing(_hardtanh, "min_val", "max_val", "inplace"))
register(F.hardsigmoid)(_increasing(_hardsigmoid, "inplace"))
register(torch.clamp, Tensor.clamp, torch.clip, Tensor.clip)(_increasing(_clamp, "min", "max"))
register(Tensor.clamp_min, torch.clamp_min)(_increasing(_clamp, "min"))
register(Tensor.clamp_max, torch.clamp_max)(_increasing(_clamp, "max"))
for _calls in (
    (torch.tanh, Tensor.tanh, F.tanh),
    (torch.sigmoid, Tensor.sigmoid, F.sigmoid),
    (F.gelu,),
    (F.silu,),
    (F.mish,),
    (F.elu,),
    (F.selu,),
    (F.celu,),
    (F.softplus,),
    (F.logsigmoid,),
    (F.softsign,),
    (F.hardswish,),
    (torch.erf, Tensor.erf),
    (torch.sin, Tensor.sin),
    (torch.cos, Tensor.cos),
    (torch.abs, Tensor.abs),
):
    register(*_calls)(elementwise(_calls[0]))
register(torch.tanh_, Tensor.tanh_)(in_place(elementwise(torch.tanh)))
register(torch.sigmoid_, Tensor.sigmoid_)(in_place(elementwise(torch.sigmoid)))


@register(F.prelu, torch.prelu)
def _prelu(x: RandomTensor, weight: Tensor) -> RandomTensor:
    """With one slope, or one for each channel."""
    mean, variance = x.moments()
    if weight.numel() > 1:
        weight = weight.view(-1, *[1] * (mean.dim() - 2))
    return RandomTensor(*leaky_rectified(mean, variance, weight))
