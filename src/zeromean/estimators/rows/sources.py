"""Where rows come from: arrays and memory maps, iterables of chunks, a Dask cluster.

Whatever the source, a fit sees it through `reduce(function, *arguments)`, the sum over chunks of
`function(chunk, *arguments)`. The statistics of a chunk are small, so memory stays flat, and on a
cluster they are all that travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from scipy import sparse
from sklearn.utils.validation import _num_samples

from zeromean.estimators.array_types import Array

Total = TypeVar("Total")
# Numbers in a slice of an array, which should fit a core's cache, unless its rows were too few; in
# a sparse one most of them are zeros.
SLICE_SIZE = 2**17
FEWEST_ROWS = 128
FEWEST_SPARSE_ROWS = 8192


class Chunk(NamedTuple):
    """Some rows: features, targets or classes, weights if they are not 1, and its number."""

    X: Any
    y: Any
    weight: Any = None
    number: int = 0

    def part(self, rows: slice) -> Chunk:
        weight = None if self.weight is None else self.weight[rows]
        return Chunk(self.X[rows], self.y[rows], weight, self.number)

    def weights(self) -> Array:
        return np.ones(self.X.shape[0]) if self.weight is None else self.weight


class Rows(Protocol):
    """All rows, by chunks."""

    def reduce(self, function: Callable[..., Total], *arguments: Any) -> Total: ...


# Makes arrays of what a chunk holds; it is where bad input is refused.
Check = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class ArrayRows:
    """Arrays in memory, sparse matrices, memory maps: read in slices."""

    X: Any
    y: Any
    weight: Any = None

    def reduce(self, function: Callable[..., Total], *arguments: Any) -> Total:
        return total(function(chunk, *arguments) for chunk in self.slices())

    def whole(self) -> Chunk:
        return Chunk(self.X, self.y, self.weight)

    def slices(self) -> Iterator[Chunk]:
        whole = self.whole()
        for number, rows in enumerate(slices_of(self.X)):
            yield whole.part(rows)._replace(number=number)


def slices_of(X: Any) -> list[slice]:
    """Some rows at a time."""
    num_rows, num_features = X.shape
    fewest = FEWEST_SPARSE_ROWS if sparse.issparse(X) else FEWEST_ROWS
    size = max(SLICE_SIZE // num_features, fewest)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


@dataclass(frozen=True)
class ChunkRows:
    """Chunks `(X, y)` or `(X, y, sample_weight)`, from a collection or from a function."""

    chunks: Iterable[tuple[Any, ...]] | Callable[[], Iterable[tuple[Any, ...]]]
    check: Check

    def reduce(self, function: Callable[..., Total], *arguments: Any) -> Total:
        return total(function(chunk, *arguments) for chunk in self._checked())

    def _checked(self) -> Iterator[Chunk]:
        number = 0
        for chunk in self.chunks() if callable(self.chunks) else self.chunks:
            if len(chunk) not in (2, 3):
                raise ValueError(
                    f"A chunk must be (X, y) or (X, y, sample_weight), got {len(chunk)} items."
                )
            X, y, weight = chunk if len(chunk) == 3 else (*chunk, None)
            if not _is_empty(X, weight):
                yield Chunk(*self.check(X, y, weight), number)
                number += 1
        if not number:
            raise ValueError(
                "chunks gave no rows; several passes need a list, or a function that returns a "
                "fresh iterator each time."
            )


@dataclass(frozen=True)
class DaskRows:
    """A dask.array, reduced block by block where its blocks are."""

    X: Any
    y: Any
    weight: Any
    check: Check

    def reduce(self, function: Callable[..., Total], *arguments: Any) -> Total:
        from dask.delayed import delayed

        X = self.X.rechunk({1: -1})
        blocks = [X.to_delayed().ravel()]
        for column in (self.y, self.weight):
            if column is None:
                blocks.append([None] * len(blocks[0]))
            else:
                blocks.append(_aligned(column, X).to_delayed().ravel())
        evaluate = delayed(_of_block, pure=False)
        # Large arguments travel once, not once a block.
        shared = [delayed(argument) for argument in (function, self.check, *arguments)]
        totals = [
            evaluate(*block, number, *shared)
            for number, block in enumerate(zip(*blocks, strict=True))
        ]
        add = delayed(_add)
        while len(totals) > 1:
            totals = [add(*totals[start : start + 2]) for start in range(0, len(totals), 2)]
        total = totals[0].compute()
        if total is None:
            raise ValueError("X has no rows of positive weight.")
        return total


def is_dask(X: Any) -> bool:
    """Whether X is a dask.array; other collections of Dask are refused."""
    if type(X).__module__.split(".")[0] not in ("dask", "dask_expr"):
        return False
    from dask import array

    if not isinstance(X, array.Array):
        raise TypeError(
            f"Wanted a dask.array, got {type(X).__name__}; a data frame has "
            "to_dask_array(lengths=True)."
        )
    return True


def _is_empty(X: Any, weight: Any) -> bool:
    return _num_samples(X) == 0 or (weight is not None and not np.any(weight))


def _of_block(X: Any, y: Any, weight: Any, number: int, function: Any, check: Any, *arguments: Any):
    if _is_empty(X, weight):
        return None
    X, y, weight = check(X, y, weight)
    return function(Chunk(X, y, weight, number), *arguments)


def _aligned(column: Any, X: Any) -> Any:
    """Targets or weights in the blocks of X."""
    from dask import array

    rows = X.chunks[0]
    unknown = bool(np.isnan(rows).any())
    if not isinstance(column, array.Array):
        column = np.asarray(column)
    if not unknown and column.shape != X.shape[:1]:
        raise ValueError(
            f"Found input variables with inconsistent numbers of samples: wanted {X.shape[0]} "
            f"values, one for each row of X, got an array of shape {column.shape}."
        )
    if unknown:
        if isinstance(column, array.Array) and column.numblocks == X.numblocks[:1]:
            return column  # Blocks of unknown length are paired, and each pair is checked.
        raise ValueError(
            "The blocks of X have unknown lengths: call X.compute_chunk_sizes() first, or give y "
            "and sample_weight in the same blocks."
        )
    if not isinstance(column, array.Array):
        return array.from_array(column, chunks=cast(Any, (rows,)))
    return column.rechunk(cast(Any, (rows,)))


def _add(first: Any, second: Any = None) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def total(parts: Iterable[Total]) -> Total:
    return reduce(_add, parts)
