"""How a tensor says how much noise each weight has, and what gradients of variances become on it.

For autograd functions, which keep this tensor (often a parameter, so that it costs no memory) and
compute the variances from it twice, in few passes.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from zeromean.functional.numerics import can_branch, smallest_normal


class Spread(Enum):
    """What the tensor holds: a signed standard deviation, or the logarithm of the variance."""

    SCALE = "scale"
    LOG_VARIANCE = "log_variance"

    def variance(self, spread: Tensor) -> Tensor:
        """The variance, at exactly zero where it would be too small for a normal number."""
        if self is Spread.SCALE:
            return flushed(spread).square()
        variance = fast_exp(spread)
        in_place = not torch.is_grad_enabled()
        return F.threshold(variance, smallest_normal(variance.dtype), 0.0, inplace=in_place)

    def pull_back(self, grad: Tensor, spread: Tensor, variance: Tensor) -> Tensor:
        """The gradient with respect to the spread, from `grad` with respect to the variance."""
        if self is Spread.LOG_VARIANCE:
            factor, times = variance, 1
        else:
            factor, times = flushed(spread), 2
        # In place, unless someone will differentiate the gradient.
        place = None if torch.is_grad_enabled() else grad
        return torch.addcmul(grad.new_zeros(()), grad, factor, value=times, out=place)


def flushed(scale: Tensor) -> Tensor:
    """The scale, at exactly zero where its square would be too small for a normal number."""
    return F.hardshrink(scale, math.sqrt(smallest_normal(scale.dtype)))


def fast_exp(x: Tensor, factor: float = 1.0) -> Tensor:
    """exp(factor · x), up to |x| ulp: torch's exp calls a library that is slow on some CPUs."""
    if torch.compiler.is_compiling():  # Compilers and exporters know exp best.
        return (factor * x).exp()
    return (x * (factor * math.log2(math.e))).exp2()


def can_draw_fast() -> bool:
    """Whether autograd is recording in plain eager mode, which is what `DrawWeight` is for."""
    return torch.is_grad_enabled() and can_branch() and forward_ad._current_level < 0


class DrawWeight(torch.autograd.Function):
    """mean + exp(½ log_variance) · noise, which overwrites the noise and keeps that one tensor."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
        deviation = noise.mul_(fast_exp(log_variance, 0.5))
        ctx.save_for_backward(log_variance, deviation)
        return mean + deviation

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_variance, deviation = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Someone will differentiate the gradient: the same, as a function of log_variance.
            deviation = deviation * (0.5 * (log_variance - log_variance.detach())).exp()
        half = torch.addcmul(grad.new_zeros(()), grad, deviation, value=0.5)
        return grad, half, None
