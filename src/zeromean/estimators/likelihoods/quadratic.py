"""The quadratic ½ vᵀ R v - τ bᵀ v + ½ τ² c that every fit here minimises under some penalty.

For least squares R is the matrix of correlations of the features, b that of their correlations
with the target and c the target's square: each feature is divided by its norm, so that units do
not matter to anything that follows. τ² is the noise precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.likelihoods.rows_quadratic import RowsQuadratic, is_far
from zeromean.estimators.rows.magnitude import TOO_LARGE
from zeromean.estimators.rows.moments import Moments
from zeromean.estimators.rows.offsets import mean_and_square, offset_of, take_off
from zeromean.estimators.rows.sources import Chunk

# With fewer rows for each feature, features can hardly be told apart.
ROWS_A_FEATURE = 2
# A matrix of more features would take too long to invert.
MOST_INVERTED = 2048
# A column whose deviations are of the size of rounding errors of its values is constant.
ROUNDING = 1e-14


class Quadratic(Protocol):
    """R by its parts; `linear` is b."""

    @property
    def linear(self) -> Array: ...

    @property
    def diagonal(self) -> Array: ...

    def block(self, rows: Indices, columns: Indices) -> Array:
        """R[rows][:, columns]."""
        ...

    def product(self, columns: Indices, v: Array) -> Array:
        """R[:, columns] @ v."""
        ...


@dataclass(frozen=True)
class MatrixQuadratic:
    """R in memory: many rows, not too many features."""

    matrix: Array
    linear: Array

    @property
    def diagonal(self) -> Array:
        return self.matrix.diagonal()

    def block(self, rows: Indices, columns: Indices) -> Array:
        return self.matrix[rows[:, None], columns]

    def product(self, columns: Indices, v: Array) -> Array:
        # R is symmetric: rows are contiguous, columns are not.
        return v @ self.matrix[columns]


@dataclass(frozen=True)
class LeastSquares:
    """A regression in units of its features: the quadratic, and the way back to their own units."""

    quadratic: Quadratic
    features: Indices  # those that vary
    count: float  # rows, by weight
    target_square: float
    mean: Array  # of all features; zeros without intercept
    target_mean: float
    scale: Array  # √Σ x² of the features that vary


def from_moments(moments: Moments, *, fit_intercept: bool) -> LeastSquares:
    centred = moments if fit_intercept else moments.about_zero()
    if not centred.is_finite():
        raise ValueError(TOO_LARGE)
    square = centred.gram.diagonal()
    features = np.flatnonzero(varying(square, moments.mean, moments.count))
    scale = np.sqrt(square[features])
    matrix = centred.gram[np.ix_(features, features)]
    matrix /= scale
    matrix /= scale[:, None]
    return LeastSquares(
        MatrixQuadratic(matrix, centred.cross[features] / scale),
        features,
        centred.count,
        centred.target_square,
        centred.mean,
        centred.target_mean,
        scale,
    )


def from_rows(rows: Chunk, *, fit_intercept: bool) -> LeastSquares:
    """For more features than rows: no matrix of features by features is formed."""
    X, target, weight = rows.X, rows.y, rows.weights()
    count = float(weight.sum())
    mean, square = mean_and_square(X, weight, count)
    target_mean = float(weight @ target / count)
    varies = varying(square if fit_intercept else square + count * mean**2, mean, count)
    if not fit_intercept:
        square, mean, target_mean = square + count * mean**2, np.zeros_like(mean), 0.0
    features = np.flatnonzero(varies)
    scale = np.sqrt(square[features])
    rest = mean
    if sparse.issparse(X):
        offset = offset_of(mean, square / count + mean**2)
        X, rest = take_off(X, offset).tocsc(), mean - offset
    else:
        X = np.asarray(X, dtype=np.float64)
        if is_far(mean[features], scale / np.sqrt(count)):
            X, rest = X - mean, np.zeros_like(mean)
    X = X if varies.all() else X[:, features]
    residual = target - target_mean
    weighted = weight * residual
    linear = (X.T @ weighted - rest[features] * weighted.sum()) / scale
    return LeastSquares(
        RowsQuadratic(X, weight, rest[features], scale, linear),
        features,
        count,
        float(residual @ weighted),
        mean,
        target_mean,
        scale,
    )


def told_apart(num_features: int, num_rows: float) -> bool:
    """Whether there are rows enough to judge every feature given all others."""
    return 0 < num_features <= min(num_rows / ROWS_A_FEATURE, MOST_INVERTED)


def varying(square: Array, mean: Array, count: float) -> NDArray[np.bool_]:
    """Features with squares about their means beyond rounding errors; the others are constant."""
    # Rounding may leave a constant less than nothing.
    return np.sqrt(np.maximum(square, 0)) > np.sqrt(count) * ROUNDING * np.abs(mean)
