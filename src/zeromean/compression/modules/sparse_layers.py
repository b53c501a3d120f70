"""Layers that multiply by few weights, for prediction: what `zm.compress` builds from sparse ones.

torch's sparse matrices are slow for weights like these. Its `embedding_bag` is not: for every
output it adds up a few rows of a table, each times a weight, which with the examples of a batch
along the rows is a product with a sparse matrix. So activations stand as `(features, batch)` here.
Measured on one thread on the first layer of LeNet-300-100 at 98.9% sparsity and a batch of 256, the
product is about 30 times faster than the dense one; with torch.sparse's CSR it is about 14 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# For a single example: a dense weight within the second-level cache, which costs no more than the
# call of `embedding_bag` alone.
_LARGEST_DENSE = 2**16
# Smaller batches cost more in calls than picking out the inputs that are read saves.
_OBJECTS_WORTH_SELECTING = 16
# Smaller batches leave the processor's vectors idle where the batch is the innermost dimension.
WORTH_GATHERING = 8
# Products of a sparse convolution for one example: beyond, their indices outgrow the caches.
_MOST_PRODUCTS = 2**22
_MOST_SIZES = 8


class SparseLinear(nn.Module):
    """`nn.Linear` with few weights: `(*, in_features)` to `(*, out_features)`.

    Args:
        weight: Dense `(out_features, in_features)`; its zeros are left out.
        bias: `(out_features,)`, or None.
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    columns: Tensor
    starts: Tensor
    inputs: Tensor
    compact_columns: Tensor
    dense_weight: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        rows, columns = weight.nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=self.out_features)
        self.values = nn.Parameter(weight.detach()[rows, columns], requires_grad=False)
        if bias is not None:
            bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.register_parameter("bias", bias)
        self.register_buffer("columns", columns.int())
        self.register_buffer("starts", (counts.cumsum(0) - counts).int())
        for derived in ("inputs", "compact_columns", "dense_weight"):
            self.register_buffer(derived, None, persistent=False)
        self._derive()

    def forward(self, input: Tensor) -> Tensor:
        require_features(input.shape[-1], self.in_features)
        if torch._C._are_functorch_transforms_active() or _is_autocast():
            # vmap has no rule for embedding_bag, and autocast none for the types of its arguments.
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():
            columns = rows.t().contiguous().to(self.values.dtype)
            output = batch_first(self.read_columns(columns))
        elif rows.shape[0] == 1:
            output = self.read_vector(rows.view(-1))
        else:
            output = batch_first(self.read_rows(rows))
        return output.view(*input.shape[:-1], self.out_features)

    def read_rows(self, x: Tensor) -> Tensor:
        """`(batch, in_features)` to `(out_features, batch)`."""
        if x.shape[0] >= _OBJECTS_WORTH_SELECTING and 4 * len(self.inputs) < 3 * self.in_features:
            return self._multiply(x.t()[self.inputs], self.compact_columns)
        return self.read_columns(batch_last(x))

    def read_columns(self, x: Tensor) -> Tensor:
        """`(in_features, batch)` to `(out_features, batch)`."""
        return self._multiply(x, self.columns)

    def read_vector(self, x: Tensor) -> Tensor:
        """`(in_features,)` to `(out_features,)`."""
        # Read from the dictionaries: for a single example, attribute look-up would be slow.
        dense, bias = self._buffers["dense_weight"], self._parameters["bias"]
        if dense is not None:
            return torch.mv(dense, x) if bias is None else torch.addmv(bias, dense, x)
        columns: Any = self._buffers["columns"]
        starts: Any = self._buffers["starts"]
        output = torch.embedding_bag(
            x.view(-1, 1), columns, starts, False, 0, False, self._parameters["values"]
        )[0].view(-1)
        return output if bias is None else output.add_(bias)

    @property
    def weight(self) -> Tensor:
        """The weight with its zeros, `(out_features, in_features)`."""
        ends = torch.cat([self.starts[1:], self.starts.new_tensor([len(self.values)])])
        rows = torch.arange(self.out_features, device=ends.device)
        weight = self.values.new_zeros(self.out_features, self.in_features)
        weight[rows.repeat_interleave(ends - self.starts), self.columns.long()] = self.values
        return weight

    def dense(self) -> nn.Linear:
        """The same layer, dense."""
        sizes = (self.in_features, self.out_features)
        layer = nn.Linear(*sizes, bias=self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        if self.bias is not None:
            layer.bias = self.bias
        return layer

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, weights={self.values.numel()}"

    def _multiply(self, table: Tensor, columns: Any) -> Tensor:
        starts: Any = self._buffers["starts"]
        output = torch.embedding_bag(
            table, columns, starts, False, 0, False, self._parameters["values"]
        )[0]
        bias = self._parameters["bias"]
        return output if bias is None else output.add_(bias.unsqueeze(1))

    def _derive(self) -> None:
        """What makes some batches faster, and is no part of the state."""
        # Where few inputs are read, a large batch is transposed without the others.
        self.inputs, compact_columns = self.columns.long().unique(return_inverse=True)
        self.compact_columns = compact_columns.int()
        size = self.out_features * self.in_features
        self.dense_weight = self.weight.detach() if size <= _LARGEST_DENSE else None

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._derive()


class SparseConv2d(nn.Module):
    """`nn.Conv2d` that multiplies by its non-zero weights only, where the batch is large enough.

    Args:
        layer: A convolution without groups, padded by zeros; its weight and bias are taken over.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Conv2d):
        super().__init__()
        if not is_simple(layer):
            raise ValueError(f"SparseConv2d needs groups=1 and padding by zeros, got {layer}.")
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size = layer.kernel_size
        self.stride: tuple[int, ...] = layer.stride
        self.padding: tuple[int, ...] = tuple(layer._reversed_padding_repeated_twice[::-2])
        self.dilation: tuple[int, ...] = layer.dilation
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        bias = layer.bias
        if bias is not None:
            bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.register_parameter("bias", bias)
        # Which products to add up, for each size of image that came by: a function of the weight
        # and the size, too costly to compute anew for every batch.
        self._products: dict[tuple[int, ...], _Products] = {}

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 3:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        if is_traced() or len(input) < WORTH_GATHERING:
            return self._convolve(input)
        return batch_first(self.read_columns(batch_last(input)))

    def read_columns(self, x: Tensor) -> Tensor:
        """`(in_channels, height, width, batch)` to `(out_channels, height, width, batch)`."""
        size, batch = x.shape[1:3], x.shape[3]
        if x.shape[0] != self.in_channels or min(self._output_size(size)) < 1:
            raise ValueError(
                f"A convolution of {self.in_channels} channels with a kernel of "
                f"{self.kernel_size} got images of {x.shape[0]} channels and "
                f"{size[0]} × {size[1]} pixels."
            )
        if self._num_products(size) > _MOST_PRODUCTS:
            return batch_last(self._convolve(batch_first(x)))
        products = self._products_for(size)
        output = torch.embedding_bag(
            x.reshape(-1, batch), products.rows, products.starts, False, 0, False, products.values
        )[0].view(self.out_channels, *self._output_size(size), batch)
        return output if self.bias is None else output.add_(self.bias.view(-1, 1, 1, 1))

    def dense(self) -> nn.Conv2d:
        """The same layer, dense."""
        geometry: Any = (self.kernel_size, self.stride, self.padding, self.dilation)
        sizes = (self.in_channels, self.out_channels)
        layer = nn.Conv2d(*sizes, *geometry, bias=self.bias is not None, device="meta")
        layer.weight, layer.bias = self.weight, self.bias
        return layer

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"bias={self.bias is not None}, weights={int(self.weight.count_nonzero())}"
        )

    def _convolve(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation)

    def _output_size(self, size: Sequence[int]) -> tuple[int, ...]:
        geometry = (size, self.kernel_size, self.stride, self.padding, self.dilation)
        return tuple(
            (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for length, kernel, stride, padding, dilation in zip(*geometry, strict=True)
        )

    def _num_products(self, size: Sequence[int]) -> int:
        height, width = self._output_size(size)
        return self.weight.numel() * height * width

    def _products_for(self, size: Sequence[int]) -> _Products:
        weight, key = self.weight, tuple(size)
        version = 0 if weight.is_inference() else weight._version
        products = self._products.get(key)
        if products is None or products.weight is not weight or products.version != version:
            with torch.inference_mode(False):  # They outlive the block that the call stands in.
                products = self._find_products(size, version)
            # Other threads may be reading: the dictionary is replaced and never changed.
            others = self._products if len(self._products) < _MOST_SIZES else {}
            self._products = {**others, key: products}
        return products

    def _find_products(self, size: Sequence[int], version: int) -> _Products:
        """For every output, in order, the rows of the flattened input and the weights."""
        device = self.weight.device
        height, width = self._output_size(size)
        top = torch.arange(height, device=device) * self.stride[0] - self.padding[0]
        left = torch.arange(width, device=device) * self.stride[1] - self.padding[1]
        top, left = (t.reshape(-1, 1) for t in torch.meshgrid(top, left, indexing="ij"))
        rows, values, counts = [], [], []
        for kernel in self.weight.detach():
            channel, i, j = kernel.nonzero(as_tuple=True)
            y, x = top + i * self.dilation[0], left + j * self.dilation[1]  # (positions, weights)
            inside = (y >= 0) & (y < size[0]) & (x >= 0) & (x < size[1])
            rows.append(((channel * size[0] + y) * size[1] + x)[inside])
            values.append(kernel[channel, i, j].expand(inside.shape)[inside])
            counts.append(inside.sum(1))
        count = torch.cat(counts)
        starts = count.cumsum(0) - count
        indices, weights = torch.cat(rows).int(), torch.cat(values)
        return _Products(indices, starts.int(), weights, self.weight, version)

    def _apply(self, fn: Any, recurse: bool = True) -> SparseConv2d:
        self._products = {}
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_products": {}}


class _Products(NamedTuple):
    rows: Tensor
    starts: Tensor
    values: Tensor
    weight: Tensor  # that they are of, and which version of it
    version: int


def require_features(number: int, wanted: int) -> None:
    """Check the size of the input: where only some of it is read, no operation would."""
    if number != wanted:
        raise ValueError(f"The network needs {wanted} features here, got {number}.")


def is_traced() -> bool:
    """Whether torch.func, a compiler or autocast looks on: then keep to plain operations."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
        or _is_autocast()
    )


def _is_autocast() -> bool:
    return not torch.compiler.is_compiling() and torch._C._is_any_autocast_enabled()


def batch_last(x: Tensor) -> Tensor:
    """(batch, *) -> (*, batch)."""
    if len(x) == 1:
        return x.reshape(*x.shape[1:], 1)  # Not transposed: embedding_bag is slow on such strides.
    return x.flatten(1).t().contiguous().view(*x.shape[1:], len(x))


def batch_first(x: Tensor) -> Tensor:
    """(*, batch) -> (batch, *)."""
    return (x.t() if x.dim() == 2 else x.movedim(-1, 0)).contiguous()


def is_simple(layer: nn.Conv2d) -> bool:
    """Whether a convolution has no groups and zeros around it, alike on both sides."""
    sides = layer._reversed_padding_repeated_twice
    return layer.groups == 1 and layer.padding_mode == "zeros" and sides[::2] == sides[1::2]
