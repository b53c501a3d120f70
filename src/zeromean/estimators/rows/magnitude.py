"""Numbers whose squares are too large for float64, or vanish in it: said, and not taken for
constants."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from scipy import sparse

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.rows.sources import Chunk

# Sums of squares below it have lost digits, or everything.
SMALLEST_SQUARE = 1e-300
TOO_LARGE = "Squares of X or y are too large for float64; rescale them."
TOO_SMALL = "Squares of {} are too small for float64; rescale them."


def check_features(rows: Chunk, square: Array) -> None:
    """Refuse rows of which no feature has squares, and warn where some have none.

    Args:
        square: Sums of squares of the features about their means.
    """
    suspects = np.flatnonzero(square < SMALLEST_SQUARE)
    if not len(suspects):
        return
    vanishing = suspects[_varies(rows, suspects)]
    if not len(vanishing):
        return
    if len(suspects) == len(square):
        raise ValueError(TOO_SMALL.format("X"))
    warnings.warn(
        f"Squares of {len(vanishing)} features of X (the first is number {vanishing[0]}) are too "
        "small for float64, which makes them constants; rescale them.",
        UserWarning,
        stacklevel=2,
    )


def check_target(rows: Chunk, square: float) -> None:
    if square < SMALLEST_SQUARE and np.ptp(rows.y[rows.weights() > 0]) > 0:
        raise ValueError(TOO_SMALL.format("y"))


def _varies(rows: Chunk, columns: Indices) -> Any:
    """Whether columns have different values in rows that count."""
    X: Any = rows.X[:, columns]
    X = X if rows.weight is None else X[rows.weight > 0]
    if not sparse.issparse(X):
        return np.ptp(np.asarray(X), axis=0) > 0
    largest, smallest = (extreme(axis=0).toarray() for extreme in (X.max, X.min))
    return (largest > smallest).ravel()
