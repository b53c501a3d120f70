"""The linear maps of the layers, as values without parameters: what op(x, weight) is.

A map knows how it acts on a weight, how the first two moments of a random weight reach its
output, and which inputs and outputs get random signs under flipout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor

from zeromean.distributions.noise import rademacher
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.posterior import Posterior

# Smaller inputs cost more in copies than they gain in the better memory format.
_WORTH_COPYING = 2**15
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class LinearMap(ABC):
    """A map that is linear in its weight."""

    @abstractmethod
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the map with a given weight."""

    @abstractmethod
    def flip(self, x: Tensor, deviation: Tensor) -> Tensor:
        """Apply a symmetric zero-mean weight with random signs of their own for every example."""

    def prefers_weights(self, x: Tensor, weight_shape: torch.Size) -> bool:
        """Whether weights are cheaper to draw than outputs, and no example can tell.

        Not where outputs of one example share weights (positions of a convolution, steps of a
        sequence): to draw those outputs apart is another distribution.
        """
        return False

    def each(self, x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the map to every example, along the first dimension, with a weight of its own."""
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            # It does not reach convolutions inside vmap.
            kind = torch.get_autocast_dtype(device)
            x, weights = x.to(kind), weights.to(kind)
            bias = None if bias is None else bias.to(kind)
        return torch.func.vmap(lambda one, weight: self(one, weight, bias))(x, weights)

    def align_bias(self, bias: Tensor) -> Tensor:
        """The bias in a shape that broadcasts against the output."""
        return bias

    def better_format(self, x: Tensor, weight: torch.Size) -> torch.memory_format | None:
        """The memory format in which the map is computed faster; None where it does not matter."""
        return None

    def moments(
        self, x: Tensor, posterior: FactorizedPosterior, bias: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Mean (None: exactly zero) and variance of each output for a random weight."""
        if self.computes_in_float16(posterior):
            # Its squares overflow above 255 and are gone below 2e-4.
            mean, scale = posterior.mean_and_scale()
            with torch.autocast(posterior.device.type, enabled=False):
                variance = posterior.silenced(scale).float().square()
                output_variance = self(squared(x.float()), variance)
        else:
            mean, variance = posterior.moments()
            output_variance = self(squared(x), variance)
        if mean is not None:
            return self(x, mean, bias), output_variance
        if bias is None:
            return None, output_variance
        kind = torch.float16 if self.computes_in_float16(posterior) else output_variance.dtype
        return self.align_bias(bias).to(kind), output_variance

    def computes_in_float16(self, posterior: Posterior) -> bool:
        """Whether products with such a weight are float16, by itself or under autocast.

        Variances are float32 then.
        """
        device = posterior.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device) == torch.float16
        return posterior.dtype == torch.float16


@dataclass(frozen=True)
class Dense(LinearMap):
    """x · weightᵀ over the last dimension."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def each(self, x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        # Twice as fast as what vmap makes of it.
        rows = x.reshape(len(x), -1, x.shape[-1])
        products = rows @ weights.mT if bias is None else torch.baddbmm(bias, rows, weights.mT)
        return products.view(*x.shape[:-1], weights.shape[1])

    def flip(self, x: Tensor, deviation: Tensor) -> Tensor:
        flipped = self(x * rademacher(x), deviation)
        return flipped * rademacher(flipped)

    def prefers_weights(self, x: Tensor, weight_shape: torch.Size) -> bool:
        # Random numbers are what costs, and a weight costs a few operations more than an output.
        return x.dim() == 2 and 4 * weight_shape[1] <= len(x)

    def pull_back(
        self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients with respect to x and weight, those that are asked for."""
        grad_x = grad @ weight if wanted[0] else None
        grad_weight = _rows(grad).T @ _rows(x) if wanted[1] else None
        return grad_x, grad_weight

    def sum_to_bias(self, grad: Tensor) -> Tensor:
        """Gradient with respect to the bias."""
        return _rows(grad).sum(0)


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
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.convolve(x, weight, bias)
        memory_format = self.better_format(x, weight.shape)
        arguments = (arranged(x, memory_format), arranged(weight, memory_format), bias)
        return arranged(self.convolve(*arguments), memory_format and torch.contiguous_format)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The map in the memory format of its arguments."""
        geometry = (self.stride, self.padding)
        if self.transposed:
            geometry = (*geometry, self.output_padding, self.groups, self.dilation)
            return _TRANSPOSED[len(self.stride)](x, weight, bias, *geometry)
        convolve = _CONVOLUTIONS[len(self.stride)]
        return convolve(x, weight, bias, *geometry, self.dilation, self.groups)

    def moments(
        self, x: Tensor, posterior: FactorizedPosterior, bias: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        # Rearranged once, for both products; `__call__` would copy each of them back.
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            x = arranged(x, self.better_format(x, posterior.shape))
        return super().moments(x, posterior, bias)

    def better_format(self, x: Tensor, weight: torch.Size) -> torch.memory_format | None:
        """channels_last where a contiguous 2-d convolution would be computed on padded channels.

        On CPU, contiguous channels are padded to multiples of 16: (20, 50) is computed as (32, 64),
        at twice the work. The kernels for channels_last do not pad, and are worth two copies there.
        """
        if x.dim() != 4 or x.device.type != "cpu" or self.groups > 1:
            return None
        rows, columns = weight[:2]
        padded = -(-rows // 16) * 16 * (-(-columns // 16) * 16)
        pays = columns >= 16 and padded > 1.5 * rows * columns and _numel(x) >= _WORTH_COPYING
        return torch.channels_last if pays and x.is_contiguous() else None

    def flip(self, x: Tensor, deviation: Tensor) -> Tensor:
        # One sign for each example and channel: within an example the weights stay shared.
        flipped = self(x * rademacher(_first_position(x)), deviation)
        return flipped * rademacher(_first_position(flipped))

    def pull_back(
        self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients with respect to x and weight, those that are asked for."""
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding[: len(self.stride)] if self.transposed else [0] * len(self.stride),
            self.groups,
            (*wanted, False),
        )
        return grad_x, grad_weight

    def sum_to_bias(self, grad: Tensor) -> Tensor:
        """Gradient with respect to the bias."""
        return grad.sum((0, *range(2, grad.dim())))

    def align_bias(self, bias: Tensor) -> Tensor:
        return bias.view(-1, *[1] * len(self.stride))


@dataclass(frozen=True)
class Projections(LinearMap):
    """Several dense maps in one weight, each of its own part of a sequence.

    The input is `(*, length, features)`, the parts one after the other, and the weight has the
    output features of the maps one after the other. So has the output, `(*, all outputs)`, which
    `split` takes apart.

    Args:
        lengths: Positions of each part.
        widths: Output features of each map.
    """

    lengths: tuple[int, ...]
    widths: tuple[int, ...]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = zip(
            x.split(self.lengths, dim=-2),
            weight.split(self.widths),
            [None] * len(self.widths) if bias is None else bias.split(self.widths),
            strict=True,
        )
        return torch.cat([F.linear(*part).flatten(-2) for part in parts], dim=-1)

    def flip(self, x: Tensor, deviation: Tensor) -> Tensor:
        flipped = self(x * rademacher(x), deviation)
        return flipped * rademacher(flipped)

    def align_bias(self, bias: Tensor) -> Tensor:
        parts = zip(bias.split(self.widths), self.lengths, strict=True)
        return torch.cat([part.repeat(length) for part, length in parts])

    def split(self, output: Tensor) -> list[Tensor]:
        """The output of each map, `(*, length, width)`."""
        sizes = list(zip(self.lengths, self.widths, strict=True))
        parts = output.split([length * width for length, width in sizes], dim=-1)
        return [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]


@dataclass(frozen=True)
class Scale(LinearMap):
    """x · weight, number by number: the affine part of a norm.

    Args:
        trailing: Dimensions of x behind those of the weight.
    """

    trailing: int = 0

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        scaled = x * self.align_bias(weight)
        return scaled if bias is None else scaled + self.align_bias(bias)

    def flip(self, x: Tensor, deviation: Tensor) -> Tensor:
        return self(x * rademacher(x), deviation)

    def align_bias(self, bias: Tensor) -> Tensor:
        return bias.view(*bias.shape, *[1] * self.trailing)


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

    def each(self, x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        # Autocast leaves look-ups alone.
        return torch.func.vmap(lambda one, weight: self(one, weight, bias))(x, weights)

    def computes_in_float16(self, posterior: Posterior) -> bool:
        return posterior.dtype == torch.float16  # Autocast leaves look-ups alone.

    def moments(
        self, x: Tensor, posterior: FactorizedPosterior, bias: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        if self.computes_in_float16(posterior):
            mean, scale = posterior.mean_and_scale(x)
            variance = posterior.silenced(scale, x).float().square()
        else:
            mean, variance = posterior.moments(rows=x)
        return mean if bias is None else bias if mean is None else mean + bias, variance


def _rows(x: Tensor) -> Tensor:
    """(*, features) -> (rows, features)."""
    return x.reshape(-1, x.shape[-1])


def _first_position(x: Tensor) -> Tensor:
    """(N, C, *spatial) -> (N, C, 1, …): one element for each example and channel."""
    for dim in range(2, x.dim()):
        x = x.narrow(dim, 0, min(1, x.shape[dim]))  # There may be no position at all.
    return x


def _numel(x: Tensor) -> int:
    """Number of elements, with all samples of a surrounding vmap."""
    while not torch.compiler.is_compiling() and is_batchedtensor(x):
        x = get_unwrapped(x)
    return x.numel()


def squared(x: Tensor) -> Tensor:
    """x², in the memory format of x.

    Element-wise operations forget the channels_last strides of images with one channel, and the
    convolution that follows would be a slow contiguous one.
    """
    square = x.square()
    if x.dim() == 4 and x.shape[1] == 1 and not torch.compiler.is_compiling():
        strides = (x.shape[2] * x.shape[3], 1, x.shape[3], 1)  # channels_last, and dense
        if x.stride() == strides != square.stride():
            return square.as_strided(x.size(), strides)
    return square


def arranged(tensor: Tensor, memory_format: torch.memory_format | None) -> Tensor:
    """The tensor in a memory format, or as it is. Works inside vmap, where torch's own does not."""
    if memory_format is None:
        return tensor
    if memory_format == torch.channels_last:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor.contiguous()
