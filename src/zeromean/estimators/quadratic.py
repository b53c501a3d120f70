"""The quadratic ½ vᵀ R v - τ bᵀ v + ½ τ² c that every fit here minimises under some penalty.

For least squares R is the matrix of correlations of the features, b that of their correlations
with the target and c the target's square: each feature is divided by its norm, so that units do
not matter to anything that follows. τ² is the noise precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from zeromean.estimators.moments import Moments
from zeromean.estimators.penalty import Array

Indices = NDArray[np.intp]
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
        return self.matrix[np.ix_(rows, columns)]

    def product(self, columns: Indices, v: Array) -> Array:
        # R is symmetric: rows are contiguous, columns are not.
        return v @ self.matrix[columns]


@dataclass(frozen=True)
class RowsQuadratic:
    """R = Zᵀ Z for few rows and many features; Z = √weight (X - mean) / scale is never formed."""

    X: Any  # (rows, features), dense or CSC
    weight: Array
    mean: Array
    scale: Array
    linear: Array

    @property
    def diagonal(self) -> Array:
        return np.ones_like(self.linear)  # Every feature has been divided by its norm.

    def block(self, rows: Indices, columns: Indices) -> Array:
        left = self._features(rows)
        return left.T @ (left if rows is columns else self._features(columns))

    def product(self, columns: Indices, v: Array) -> Array:
        fit = np.sqrt(self.weight) * (self._features(columns) @ v)
        return (self.X.T @ fit - self.mean * fit.sum()) / self.scale

    def _features(self, columns: Indices) -> Array:
        X = self.X[:, columns]
        dense = X.toarray() if sparse.issparse(X) else np.asarray(X)
        dense = (dense - self.mean[columns]) / self.scale[columns]
        return dense * np.sqrt(self.weight)[:, None]


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
    square = centred.gram.diagonal()
    features = _varying(square, moments.mean, moments.count)
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


def from_rows(X: Any, target: Array, weight: Array | None, *, fit_intercept: bool) -> LeastSquares:
    """Without a matrix of features by features: for more features than rows."""
    weight = np.ones(X.shape[0]) if weight is None else weight
    count = float(weight.sum())
    if sparse.issparse(X):
        X = X.tocsc()
        mean = X.T @ weight / count
        square = X.power(2).T @ weight - count * mean**2
    else:
        X = np.asarray(X, dtype=np.float64)
        mean = weight @ X / count
        square = weight @ (X - mean) ** 2
    target_mean = float(weight @ target / count)
    features = _varying(square if fit_intercept else square + count * mean**2, mean, count)
    if not fit_intercept:
        square, mean, target_mean = square + count * mean**2, np.zeros_like(mean), 0.0
    scale = np.sqrt(square[features])
    residual = target - target_mean
    weighted = weight * residual
    linear = (X.T @ weighted - mean * weighted.sum())[features] / scale
    quadratic = RowsQuadratic(X[:, features], weight, mean[features], scale, linear)
    target_square = float(residual @ weighted)
    return LeastSquares(quadratic, features, count, target_square, mean, target_mean, scale)


def _varying(square: Array, mean: Array, count: float) -> Indices:
    return np.flatnonzero(square > count * (ROUNDING * mean) ** 2)
