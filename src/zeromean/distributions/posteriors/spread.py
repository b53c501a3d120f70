"""How a tensor says how much noise each weight has, and what gradients of variances become on it.

For autograd functions, which keep this tensor (often a parameter, so that it costs no memory) and
compute the variances from it twice, in few passes.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.functional.numerics import smallest_normal


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


def fast_exp(x: Tensor) -> Tensor:
    """exp(x), correct to |x| ulp: torch's exp goes through a library that is slow on some CPUs."""
    if torch.compiler.is_compiling():  # Compilers and exporters know exp best.
        return x.exp()
    return (x * math.log2(math.e)).exp2()
