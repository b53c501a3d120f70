"""Where the units of an activation lie, and what rearranging its positions does to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from zeromean.compression.graph.roles import Role

# The fewest and the most dimensions that a tensor may have.
Dims = tuple[int, int | None]


@dataclass(frozen=True)
class Units:
    """The units of one activation: the features of `(*, F)`, or the channels of `(N, C, *)`.

    Attributes:
        constants: The value of every unit that is constant, NaN for the others.
        last: Whether they lie along the last dimension, not along dimension 1.
        dims: Number of dimensions, None where nothing tells.
        proven: Whether `dims` holds for every input, and is not a guess or that of an example.
        assumes: What is taken for granted about the dimensions of what was read.
    """

    constants: Tensor
    last: bool
    dims: int | None
    proven: bool
    assumes: Dims | None = None

    def __len__(self) -> int:
        return len(self.constants)

    def with_dims(self, fewest: int, most: int | None = None) -> Units | None:
        """The same, supposed to have so many dimensions; None where it has not, for all we know."""
        if self.dims is None or not fewest <= self.dims <= (most or self.dims):
            return None
        return replace(self, assumes=None if self.proven else (fewest, most))

    def with_constants(self, constants: Tensor) -> Units:
        return replace(self, constants=constants)


def rearranged(role: Role, node: fx.Node, source: Units) -> Units | None:
    """The units behind a node that picks, reduces or permutes positions; None if it cuts them."""
    if role is Role.MERGE:  # All dimensions but the last.
        return replace(source, dims=2, proven=True) if source.last else None
    options = dict(node.kwargs)
    keepdim = options.pop("keepdim", node.args[2] if len(node.args) > 2 else False)
    arguments = [*node.args[1:], *options.values()]
    if not arguments or options.keys() - {"dim", "start_dim"}:
        return None
    if role is Role.PICK:
        return _picked(source, arguments[0])
    if role is Role.JOIN:
        return _joined(source) if arguments in ([2], [2, -1]) else None
    if role is Role.PERMUTE:
        order = arguments[0] if isinstance(arguments[0], (tuple, list)) else arguments
        return _permuted(source, list(order))
    if role is Role.TRANSPOSE:
        return _transposed(source, *arguments) if len(arguments) == 2 else None
    reduced = _reduced(source, arguments[0], bool(keepdim))
    if reduced is None or role is Role.REDUCE:
        return reduced
    # How much a constant adds up to depends on the number of positions.
    return reduced.with_constants(torch.where(reduced.constants == 0, 0.0, math.nan))


def concatenated_dim(node: fx.Node) -> Any:
    """Along which dimension a node concatenates."""
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)


def _picked(source: Units, index: Any) -> Units | None:
    """x[index]."""
    index = index if isinstance(index, tuple) else (index,)
    whole = slice(None)
    if not index:
        return source
    if source.last and index[0] is Ellipsis:
        index = index[1:]
        supposed = source if index and index[-1] == whole else None
    elif source.last:
        supposed = source.with_dims(len(index) + 1)
    else:
        kept = isinstance(index[0], slice) and index[1:2] in ((), (whole,))
        supposed = source if kept else None
    if supposed is None or not all(type(i) in (int, slice) for i in index):
        return None
    return _with_fewer_dims(supposed, sum(isinstance(i, int) for i in index))


def _reduced(source: Units, dim: Any, keepdim: bool) -> Units | None:
    """Mean, sum or maximum over dimensions."""
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if not dims or not all(isinstance(d, int) for d in dims):
        return None
    if source.last:
        supposed = None if -1 in dims else source.with_dims(max(max(dims) + 2, 2))
    else:
        assert source.dims is not None
        supposed = source if all(d % source.dims >= 2 for d in dims) else None
    if supposed is None or keepdim:
        return supposed
    return _with_fewer_dims(supposed, len(dims))


def _joined(source: Units) -> Units | None:
    """x.flatten(2): all positions in a row."""
    return None if source.last else replace(source, dims=3)


def _permuted(source: Units, order: list[Any]) -> Units | None:
    """x.permute(order)."""
    number = len(order)
    supposed = source.with_dims(number, number)
    if supposed is None or not all(isinstance(d, int) for d in order):
        return None
    place = [d % number for d in order].index(number - 1 if source.last else 1)
    if place not in (1, number - 1):
        return None
    return replace(supposed, last=place == number - 1, dims=number, proven=True)


def _transposed(source: Units, first: Any, second: Any) -> Units | None:
    """x.transpose(first, second)."""
    if source.last and {first, second} == {0, 1}:
        return source.with_dims(3)
    order = list(range(source.dims or 0))
    if not all(type(d) is int and -len(order) <= d < len(order) for d in (first, second)):
        return None
    order[first], order[second] = order[second], order[first]
    return _permuted(source, order)


def _with_fewer_dims(source: Units, number: int) -> Units:
    if source.dims is None:  # Behind an ellipsis.
        return source
    dims = source.dims - number
    return replace(source, dims=dims, last=source.last or dims == 2)


REARRANGING = {
    Role.MERGE,
    Role.PICK,
    Role.JOIN,
    Role.PERMUTE,
    Role.TRANSPOSE,
    Role.REDUCE,
    Role.SUM,
}
