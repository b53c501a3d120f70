"""Convolutions with random weights: drop-in twins of torch's Conv1d, Conv2d, Conv3d and
ConvTranspose2d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.arguments import (
    require_floating,
    require_integer,
    require_same_dtype,
    require_sizes,
)
from zeromean.distributions.posteriors.posterior import PosteriorFactory, WeightLayout
from zeromean.distributions.posteriors.zero_mean import ZeroMean
from zeromean.layers.stochastic_layer import (
    BiasChoice,
    PriorChoice,
    SamplerChoice,
    StochasticLayer,
    build_posterior,
)
from zeromean.registry import register
from zeromean.samplers.linear_maps import Convolution, LinearMap

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class _ConvNd(StochasticLayer):
    """A convolution, transposed or not, with the geometry of a torch layer on the meta device.

    torch's own layer checks the arguments and normalises them, so that they mean what they mean
    there.
    """

    def __init__(
        self,
        geometry: Any,
        bias: BiasChoice,
        posterior: PosteriorFactory,
        prior: PriorChoice,
        sampler: SamplerChoice,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        layout = WeightLayout()
        if geometry.transposed:
            layout = WeightLayout(neuron_dim=1, groups=geometry.groups)
        shape = geometry.weight.shape
        distribution = build_posterior(posterior, shape, layout=layout, device=device, dtype=dtype)
        super().__init__(distribution, geometry.out_channels, prior, sampler, bias)
        self.in_channels = geometry.in_channels
        self.out_channels = geometry.out_channels
        self.kernel_size = geometry.kernel_size
        self.stride = geometry.stride
        self.padding = geometry.padding
        self.dilation = geometry.dilation
        self.groups = geometry.groups
        self.padding_mode = geometry.padding_mode
        self.transposed = geometry.transposed
        self.output_padding = geometry.output_padding
        # In F.pad's order: (left, right) of the last dimension first.
        self._sides = tuple(geometry._reversed_padding_repeated_twice)
        uneven = self._sides[::2] != self._sides[1::2]
        # What a convolution cannot pad itself (reflect, circular, uneven "same") is padded first.
        self._pads_first = self.padding_mode != "zeros" or uneven
        self._inner_padding = (
            (0,) * self.num_spatial_dims if self._pads_first else self._sides[::-2]
        )

    @property
    def num_spatial_dims(self) -> int:
        return len(self.kernel_size)

    def linear_map(self) -> Convolution:
        return Convolution(
            self.stride,
            self._inner_padding,
            self.dilation,
            self.groups,
            self.transposed,
            self.output_padding,
        )

    def prepare(self, x: Tensor) -> Tensor:
        require_floating(type(self).__name__, x)
        channel_dim = x.dim() - self.num_spatial_dims - 1
        if channel_dim not in (0, 1) or x.shape[channel_dim] != self.in_channels:
            spatial = ", ".join("DHW"[-self.num_spatial_dims :])
            raise ValueError(
                f"{type(self).__name__} needs an input of shape (N, {self.in_channels}, {spatial}) "
                f"or ({self.in_channels}, {spatial}), got {tuple(x.shape)}; reshape it, or change "
                "in_channels."
            )
        require_same_dtype(type(self).__name__, x, self.weight.dtype)
        self._require_size(x)
        if self._pads_first:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = F.pad(x, self._sides, mode=mode)
        return x if channel_dim == 1 else x.unsqueeze(0)

    def _require_size(self, x: Tensor) -> None:
        """Refuse inputs that are smaller than the kernel, or than what is padded from them."""
        sizes = x.shape[-self.num_spatial_dims :]
        if self.transposed:
            outputs = zip(self._smallest_output(sizes), self.output_padding, strict=True)
            is_large = all(size + extra > 0 for size, extra in outputs)
        else:
            sides = zip(self._sides[-2::-2], self._sides[::-2], strict=True)
            spans = (d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True))
            # Reflection leaves out the edge; circular padding may go round once.
            mode = self.padding_mode
            is_large = all(
                size + sum(side) >= span
                and (mode != "reflect" or max(side) < size)
                and (mode != "circular" or max(side) <= size)
                for size, side, span in zip(sizes, sides, spans, strict=True)
            )
        if not is_large:
            raise ValueError(
                f"{type(self).__name__} with kernel_size={self.kernel_size}, "
                f"dilation={self.dilation}, padding={self.padding} and "
                f"padding_mode={self.padding_mode!r} needs a larger input than {tuple(x.shape)}; "
                "enlarge it, or change these."
            )

    def _smallest_output(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The size of a transposed convolution's output without output padding."""
        return tuple(
            (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
            for size, stride, padding, dilation, kernel in zip(
                sizes,
                self.stride,
                self._inner_padding,
                self.dilation,
                self.kernel_size,
                strict=True,
            )
        )

    def plain_twin(self) -> nn.Module:
        return self.torch_twin(**convolution_settings(self), device="meta")

    @classmethod
    def from_torch(cls, module: Any, **options: Any) -> Self:
        return cls(**convolution_settings(module), **options)

    def forward(self, input: Tensor) -> Tensor:
        return self._draw(input, self.linear_map())

    def _draw(self, x: Tensor, op: LinearMap) -> Tensor:
        y = self.draw(op, self.prepare(x))
        return y if x.dim() == y.dim() else y.squeeze(0)

    def extra_repr(self) -> str:
        defaults = {
            "stride": (1,) * self.num_spatial_dims,
            "padding": (0,) * self.num_spatial_dims,
            "output_padding": (0,) * self.num_spatial_dims,
            "dilation": (1,) * self.num_spatial_dims,
            "groups": 1,
            "padding_mode": "zeros",
        }
        options = [
            f"{name}={getattr(self, name)!r}"
            for name, default in defaults.items()
            if getattr(self, name) != default
        ]
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        return ", ".join([sizes, *options, super().extra_repr()])


class _Convolution(_ConvNd):
    """torch's signature of Conv1d, Conv2d and Conv3d, once."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: BiasChoice = True,
        padding_mode: PaddingMode = "zeros",
        *,
        posterior: PosteriorFactory = ZeroMean,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        geometry = _geometry(
            self.torch_twin,
            in_channels,
            out_channels,
            groups,
            padding_mode,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
        )
        super().__init__(geometry, bias, posterior, prior, sampler, device, dtype)


@register("layer")
class Conv1d(_Convolution):
    """`nn.Conv1d` with a random weight."""

    torch_twin = nn.Conv1d


@register("layer")
class Conv2d(_Convolution):
    """`nn.Conv2d` with a random weight."""

    torch_twin = nn.Conv2d


@register("layer")
class Conv3d(_Convolution):
    """`nn.Conv3d` with a random weight."""

    torch_twin = nn.Conv3d


class ConvTransposeNd(_ConvNd):
    """torch's signature of transposed convolutions, once."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: BiasChoice = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: PaddingMode = "zeros",
        *,
        posterior: PosteriorFactory = ZeroMean,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        geometry = _geometry(
            self.torch_twin,
            in_channels,
            out_channels,
            groups,
            padding_mode,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            dilation=dilation,
        )
        for extra, *steps in zip(
            geometry.output_padding, geometry.stride, geometry.dilation, strict=True
        ):
            if extra >= max(steps):
                raise ValueError(
                    "output_padding must be smaller than stride or dilation, got "
                    f"output_padding={geometry.output_padding}, stride={geometry.stride} and "
                    f"dilation={geometry.dilation}."
                )
        super().__init__(geometry, bias, posterior, prior, sampler, device, dtype)

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        op = self.linear_map()
        if output_size is not None:
            op = replace(op, output_padding=self._padding_for(input, output_size))
        return self._draw(input, op)

    def _padding_for(self, x: Tensor, output_size: Sequence[int]) -> tuple[int, ...]:
        """The output padding that gives `output_size`, of which a stride leaves several."""
        output_size = [require_integer("output_size", size) for size in output_size]
        count = self.num_spatial_dims
        if len(output_size) not in (count, x.dim()):
            spatial = ", ".join("DHW"[-count:])
            raise ValueError(
                f"output_size must be ({spatial}) or a whole shape, got {tuple(output_size)}."
            )
        smallest = self._smallest_output(x.shape[-count:])
        wanted = tuple(output_size[-count:])
        extra = tuple(size - least for size, least in zip(wanted, smallest, strict=True))
        if any(not 0 <= more < stride for more, stride in zip(extra, self.stride, strict=True)):
            largest = tuple(s + stride - 1 for s, stride in zip(smallest, self.stride, strict=True))
            raise ValueError(
                f"{type(self).__name__} can give sizes from {smallest} to {largest} for an input "
                f"of shape {tuple(x.shape)}, got output_size={wanted}."
            )
        return extra


@register("layer")
class ConvTranspose2d(ConvTransposeNd):
    """`nn.ConvTranspose2d` with a random weight."""

    torch_twin = nn.ConvTranspose2d


def _geometry(
    twin: Any, in_channels: int, out_channels: int, groups: int, padding_mode: str, **sizes: Any
) -> Any:
    """torch's layer on the meta device, of sizes that are whole numbers for every dimension."""
    count = _num_spatial_dims(twin)
    for name, value in sizes.items():
        if name != "padding" or not isinstance(value, str):  # "same" and "valid" are torch's.
            at_least = 0 if "padding" in name else 1
            sizes[name] = require_sizes(name, value, count, at_least=at_least)
    return twin(
        require_integer("in_channels", in_channels, at_least=1),
        require_integer("out_channels", out_channels, at_least=1),
        groups=require_integer("groups", groups, at_least=1),
        padding_mode=padding_mode,
        device="meta",
        **sizes,
    )


@cache
def _num_spatial_dims(twin: Any) -> int:
    return len(twin(1, 1, 1, device="meta").kernel_size)


def convolution_settings(module: Any) -> dict[str, Any]:
    """What builds a convolution again, torch's or ours."""
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"]
    names += ["groups", "padding_mode", *(["output_padding"] if module.transposed else [])]
    settings = {name: getattr(module, name) for name in names}
    return {**settings, "bias": module.bias is not None}
