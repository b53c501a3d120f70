"""Offsets of sparse columns: what must be taken off before squares are summed.

Sparse rows cannot be centred and stay sparse, so sums about zero are corrected afterwards. That
loses digits where the mean of a column is large compared with its deviations. Only a column with
hardly any zeros can have such a mean, and only such columns are centred.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from zeromean.estimators.array_types import Array


def take_off(X: Any, offset: Array) -> Any:
    """Sparse rows less an offset of some columns, which become dense."""
    if not offset.any():
        return X
    return X - sparse.csr_array(np.ones((X.shape[0], 1))) @ sparse.csr_array(offset[None])


def mean_and_square(X: Any, weight: Array, count: float) -> tuple[Array, Array]:
    """Weighted means of the columns of dense or sparse rows, and squares about them."""
    mean = X.T @ weight / count
    if not sparse.issparse(X):
        return mean, weight @ (np.asarray(X, dtype=np.float64) - mean) ** 2
    offset = offset_of(mean, X.power(2).T @ weight / count)
    rest = mean - offset
    squares = take_off(X, offset).power(2).T @ weight - count * rest**2
    return mean, np.maximum(squares, 0)


def offset_of(mean: Array, mean_square: Array) -> Array:
    """The means of columns that are large compared with their deviations, and 0 for the others."""
    return np.where(2 * mean**2 > mean_square, mean, 0.0)
