"""Sparse rows in memory, made ready once for the many passes of a classifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scipy import sparse

from zeromean.estimators.rows.columns import Features, Scaling
from zeromean.estimators.rows.sources import ArrayRows, Chunk, Rows, Total, total


@dataclass(frozen=True)
class ScaledRows:
    """Chunks whose X are `Features`."""

    chunks: list[Chunk]

    def reduce(self, function: Callable[..., Total], *arguments: Any) -> Total:
        return total(self._of(chunk, function, *arguments) for chunk in self.chunks)

    def _of(self, chunk: Chunk, function: Callable[..., Total], *arguments: Any) -> Total:
        result = function(chunk, *arguments)
        if len(self.chunks) > 1:  # Dense columns of many would not fit.
            chunk.X.forget()
        return result


def made_ready(rows: Rows, scaling: Scaling) -> Rows:
    """Sparse rows by columns, in units of their deviations; dense ones as they are.

    Dense rows cost less to scale than to keep twice, and others may lie anywhere.
    """
    if not (isinstance(rows, ArrayRows) and sparse.issparse(rows.X)):
        return rows
    return ScaledRows(
        [
            chunk._replace(X=Features(chunk.X, scaling), weight=chunk.weights())
            for chunk in rows.slices()
        ]
    )


def features_of(chunk: Chunk, scaling: Scaling) -> Features:
    return chunk.X if isinstance(chunk.X, Features) else Features(chunk.X, scaling)
