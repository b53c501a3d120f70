"""The linear maps of the layers, as values without parameters: what op(x, weight) is.

A map knows how it acts on a weight, how the first two moments of a random weight reach its
output, and for what flipout draws signs of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from zeromean.noise import rademacher
from zeromean.posteriors import Posterior

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class LinearMap(ABC):
    """A map that is linear in its weight."""

    @abstractmethod
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the map with a given weight."""

    @abstractmethod
    def flip(self, x: Tensor, deviation: Tensor) -> Tensor:
        """Apply a symmetric zero-mean weight with random signs of their own for every object."""

    def align_bias(self, bias: Tensor) -> Tensor:
        """The bias in a shape that broadcasts against the output."""
        return bias

    def moments(
        self, x: Tensor, posterior: Posterior, bias: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Mean (None: exactly zero) and variance of each output for a random weight."""
        mean, variance = posterior.moments()
        output_variance = self(x.square(), variance)
        if mean is not None:
            return self(x, mean, bias), output_variance
        return None if bias is None else self.align_bias(bias), output_variance


@dataclass(frozen=True)
class Dense(LinearMap):
    """x · weightᵀ over the last dimension."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def flip(self, x: Tensor, deviation: Tensor) -> Tensor:
        flipped = self(x * rademacher(x), deviation)
        return flipped * rademacher(flipped)


@dataclass(frozen=True)
class Convolution(LinearMap):
    """A convolution over len(stride) spatial dimensions of a batch `(N, C, *spatial)`."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = (0, 0)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        geometry = (self.stride, self.padding)
        if self.transposed:
            geometry = (*geometry, self.output_padding, self.groups, self.dilation)
            return F.conv_transpose2d(x, weight, bias, *geometry)
        convolve = _CONVOLUTIONS[len(self.stride)]
        return convolve(x, weight, bias, *geometry, self.dilation, self.groups)

    def flip(self, x: Tensor, deviation: Tensor) -> Tensor:
        # One sign for each object and channel: within an object the weights stay shared.
        flipped = self(x * rademacher(_first_position(x)), deviation)
        return flipped * rademacher(_first_position(flipped))

    def align_bias(self, bias: Tensor) -> Tensor:
        return bias.view(-1, *[1] * len(self.stride))


@dataclass(frozen=True)
class LookUp(LinearMap):
    """Rows of the weight: linear in it, with one-hot inputs that are their own squares."""

    padding_idx: int | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = F.embedding(x, weight, self.padding_idx)
        return rows if bias is None else rows + bias

    def flip(self, x: Tensor, deviation: Tensor) -> Tensor:
        rows = self(x, deviation)
        return rows * rademacher(rows)

    def moments(
        self, x: Tensor, posterior: Posterior, bias: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        mean, variance = posterior.moments(rows=x)
        return mean if bias is None else bias if mean is None else mean + bias, variance


def _first_position(x: Tensor) -> Tensor:
    """(N, C, *spatial) -> (N, C, 1, …): one element for each object and channel."""
    for dim in range(2, x.dim()):
        x = x.narrow(dim, 0, 1)
    return x
