"""Modules one after the other on activations that have the batch as their last dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeromean.compression.modules.sparse_layers import (
    WORTH_GATHERING,
    SparseConv2d,
    SparseLinear,
    batch_first,
    batch_last,
    is_traced,
    require_features,
)


class _Plan(NamedTuple):
    steps: list[Any]
    on_images: list[Any]
    on_rows: list[Any]


class BatchLast(nn.Module):
    """A chain of modules, some of them sparse, that shares one arrangement of memory.

    A batch is transposed once at the start and once at the end. A single example is a vector, and
    a small batch of images is convolved as usual. Once a step is replaced by another module, the
    steps run one after the other like those of nn.Sequential.

    Args:
        steps: By name SparseConv2d, MaxPool2d without padding and element-wise modules; then
            Flatten; then Linear, SparseLinear and element-wise modules. Each part may be missing.
    """

    def __init__(self, steps: Mapping[str, nn.Module]):
        super().__init__()
        for name, step in steps.items():
            self.add_module(name, step)
        modules = list(steps.values())
        flatten = [number for number, step in enumerate(modules) if type(step) is nn.Flatten]
        linear: list[Any] = [m for m in modules if type(m) in (nn.Linear, SparseLinear)]
        self.flattens = bool(flatten)
        self._num_features = linear[0].in_features if linear else None
        end = flatten[0] if flatten else 0 if linear else len(modules)
        # For these modules; with others in their places, see `forward`.
        self._plan = _Plan(modules, modules[:end], modules[end + self.flattens :])

    def steps(self) -> list[nn.Module]:
        """In their order, also those that come twice."""
        return list(self._modules.values())  # pyright: ignore[reportReturnType]

    def unrolled(self) -> nn.Sequential:
        """The same steps one by one, with the batch in front, as in torch's layers."""
        return nn.Sequential(*self.steps())

    def forward(self, input: Tensor) -> Tensor:
        if is_traced() or self.steps() != self._plan.steps:
            for step in self.steps():
                input = step(input)
            return input
        if self._plan.on_images:
            return self._read_images(input)
        if self.flattens:
            return self._read_rows(input.flatten(1))
        if input.dim() == 2:
            return self._read_rows(input)
        rows = self._read_rows(input.reshape(-1, input.shape[-1]))
        return rows.view(*input.shape[:-1], rows.shape[-1])

    def _read_images(self, x: Tensor) -> Tensor:
        if x.dim() == 3 and not self.flattens:
            return self._read_images(x.unsqueeze(0)).squeeze(0)
        if x.dim() != 4:
            raise ValueError(f"The network needs images (N, C, H, W), got shape {tuple(x.shape)}.")
        batch = x.shape[0]
        if batch < WORTH_GATHERING:
            for step in self._plan.on_images:
                x = step.forward(x)
            return self._read_rows(x.flatten(1)) if self.flattens else x
        x = batch_last(x)
        for step in self._plan.on_images:
            x = _run(step, x)
        if not self.flattens:
            return batch_first(x)
        columns = x.reshape(-1, batch)
        self._require_features(columns.shape[0])
        return self._read_columns(columns)

    def _read_rows(self, x: Tensor) -> Tensor:
        on_rows = self._plan.on_rows
        if not on_rows:
            return x
        self._require_features(x.shape[1])
        if x.shape[0] == 1:
            x = x.view(-1)
            for step in on_rows:
                kind = type(step)
                x = _ON_VECTORS[kind](step, x) if kind in _ON_VECTORS else step.forward(x)
            return x.view(1, -1)
        first = on_rows[0]
        if type(first) is SparseLinear:
            return self._read_columns(first.read_rows(x), start=1)
        return self._read_columns(x.t())

    def _read_columns(self, x: Tensor, start: int = 0) -> Tensor:
        for step in self._plan.on_rows[start:]:
            x = _run(step, x)
        return batch_first(x)

    def _require_features(self, number: int) -> None:
        if self._num_features is not None:
            require_features(number, self._num_features)


def _run(step: Any, x: Tensor) -> Tensor:
    run = _ON_COLUMNS.get(type(step))
    return step.forward(x) if run is None else run(step, x)


def _dense(layer: Any, x: Tensor) -> Tensor:
    if layer.bias is None:
        return layer.weight @ x
    return torch.addmm(layer.bias.unsqueeze(1), layer.weight, x)


def _dense_on_vector(layer: Any, x: Tensor) -> Tensor:
    # Read from the dictionaries: for a single example, attribute look-up would be slow.
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    return torch.mv(weight, x) if bias is None else torch.addmv(bias, weight, x)


def _max_pool(layer: Any, x: Tensor) -> Tensor:
    """Maximum over windows of `(channels, height, width, batch)`, window place by window place."""
    (kernel_y, kernel_x), (stride_y, stride_x), (dilation_y, dilation_x) = (
        (v, v) if isinstance(v, int) else v
        for v in (layer.kernel_size, layer.stride, layer.dilation)
    )
    last_y = x.shape[1] - dilation_y * (kernel_y - 1)
    last_x = x.shape[2] - dilation_x * (kernel_x - 1)
    if last_y < 1 or last_x < 1:
        raise ValueError(f"{layer} needs larger images, got {x.shape[1]} × {x.shape[2]}.")
    largest = None
    for top in range(0, kernel_y * dilation_y, dilation_y):
        for left in range(0, kernel_x * dilation_x, dilation_x):
            places = x[:, top : top + last_y : stride_y, left : left + last_x : stride_x]
            largest = places if largest is None else torch.maximum(largest, places)
    assert largest is not None
    return largest


# ReLU in place: every step gets a tensor that the step before made.
_ON_COLUMNS: dict[type[nn.Module], Any] = {
    SparseLinear: SparseLinear.read_columns,
    SparseConv2d: SparseConv2d.read_columns,
    nn.Linear: _dense,
    nn.MaxPool2d: _max_pool,
    nn.ReLU: lambda _, x: x.relu_(),
}
_ON_VECTORS: dict[type[nn.Module], Any] = {
    SparseLinear: SparseLinear.read_vector,
    nn.Linear: _dense_on_vector,
    nn.ReLU: lambda _, x: x.relu_(),
}
