"""Where rows come from: arrays and memory maps, iterables of chunks, a Dask cluster.

Whatever the source, a fit sees it through `reduce(function, *arguments)`, the sum over chunks of
`function(X, y, weight, *arguments)`. The statistics of a chunk are small, so memory stays flat, and
on a cluster they are all that travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol, TypeVar, cast

import numpy as np

Total = TypeVar("Total")
# Numbers in a chunk: it should fit a core's cache, but not be so short that merging shows.
CHUNK_SIZE = 2**17


class Rows(Protocol):
    """Rows of features, targets and weights (None for ones), by chunks."""

    @property
    def num_features(self) -> int: ...

    def reduce(self, function: Callable[..., Total], *arguments: Any) -> Total: ...


@dataclass(frozen=True)
class ArrayRows:
    """Arrays in memory, sparse matrices, memory maps: read in slices."""

    X: Any
    y: Any
    weight: Any = None

    @property
    def num_features(self) -> int:
        return self.X.shape[1]

    def reduce(self, function: Callable[..., Total], *arguments: Any) -> Total:
        return _total(function(*chunk, *arguments) for chunk in self._chunks())

    def _chunks(self) -> Iterator[tuple[Any, Any, Any]]:
        num_rows, num_features = self.X.shape
        size = max(2 * num_features, CHUNK_SIZE // max(num_features, 1), 1)
        for start in range(0, num_rows, size):
            part = slice(start, start + size)
            yield self.X[part], self.y[part], None if self.weight is None else self.weight[part]


@dataclass(frozen=True)
class ChunkRows:
    """Chunks `(X, y)` or `(X, y, sample_weight)`, from a collection or from a function.

    `check` makes arrays of what a chunk holds; it is where bad input is refused.
    """

    chunks: Iterable[tuple[Any, ...]] | Callable[[], Iterable[tuple[Any, ...]]]
    check: Callable[..., tuple[Any, Any, Any]]

    @property
    def num_features(self) -> int:
        return next(self._checked())[0].shape[1]

    def reduce(self, function: Callable[..., Total], *arguments: Any) -> Total:
        return _total(function(*chunk, *arguments) for chunk in self._checked())

    def _checked(self) -> Iterator[tuple[Any, Any, Any]]:
        empty = True
        for chunk in self.chunks() if callable(self.chunks) else self.chunks:
            empty = False
            yield self.check(*chunk)
        if empty:
            raise ValueError(
                "chunks gave no rows; several passes need a list, or a function that returns a "
                "fresh iterator each time."
            )


@dataclass(frozen=True)
class DaskRows:
    """A dask.array, reduced block by block where its blocks are."""

    X: Any
    y: Any
    weight: Any = None

    @property
    def num_features(self) -> int:
        return self.X.shape[1]

    def reduce(self, function: Callable[..., Total], *arguments: Any) -> Total:
        from dask.delayed import delayed

        X = self.X.rechunk({1: -1})
        parts = [X.to_delayed().ravel()]
        for column in (self.y, self.weight):
            if column is None:
                parts.append([None] * len(parts[0]))
            else:
                parts.append(_aligned(column, X.chunks[0]).to_delayed().ravel())
        compute = delayed(function, pure=False)
        # Large arguments travel once, not once a block.
        shared = [delayed(argument) for argument in arguments]
        totals = [compute(*chunk, *shared) for chunk in zip(*parts, strict=True)]
        add = delayed(_add)
        while len(totals) > 1:
            totals = [add(*totals[start : start + 2]) for start in range(0, len(totals), 2)]
        return totals[0].compute()


def is_dask(X: Any) -> bool:
    return type(X).__module__.split(".")[0] == "dask"


def _aligned(column: Any, chunks: tuple[int, ...]) -> Any:
    from dask import array

    if not is_dask(column):
        column = array.from_array(np.asarray(column), chunks=cast(Any, (chunks,)))
    return column.rechunk((chunks,))


def _add(first: Any, *second: Any) -> Any:
    return first + second[0] if second else first


def _total(parts: Iterable[Total]) -> Total:
    return reduce(_add, parts)
