"""The quadratic of few rows and many features: R = Zᵀ Z, of which a search needs some rows.

The matrix of features by features is never formed, nor is Z = √weight (X - mean) / scale. A search
asks for the rows of R that belong to features in its model, again and again: each costs one pass
over X, and is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from zeromean.estimators.array_types import Array, Indices

# Numbers of R that are kept, at most.
MOST_KEPT = 2**25
# Means of so many deviations leave too few digits of products that are centred afterwards.
FAR = 1e3


def is_far(mean: Array, deviation: Array) -> bool:
    """Whether dense columns must be centred before they are multiplied."""
    return bool((np.abs(mean) > FAR * deviation).any())


class RowsQuadratic:
    """R by its rows.

    Args:
        X: (rows, features), dense or CSC.
        weight: Of the rows.
        mean: What the columns of X are to be centred by.
        scale: What they are to be divided by, after that.
        linear: b.
    """

    def __init__(self, X: Any, weight: Array, mean: Array, scale: Array, linear: Array):
        self.X, self.weight, self.mean, self.scale = X, weight, mean, scale
        self.linear = linear
        self.diagonal = np.ones_like(linear)  # Every feature has been divided by its norm.
        self._kept = np.zeros((0, len(linear)))
        self._num_kept = 0
        self._place = np.full(len(linear), -1, dtype=np.intp)

    def block(self, rows: Indices, columns: Indices) -> Array:
        if len(rows) * len(self.linear) > MOST_KEPT:
            if len(columns) < len(rows):
                return self.block(columns, rows).T
            return self._product(rows, columns)
        places = self._places(rows)
        return self._kept[places[:, None], columns]

    def product(self, columns: Indices, v: Array) -> Array:
        if len(columns) * len(self.linear) > MOST_KEPT:
            return self._projected(self._features(columns) @ v)
        places = self._places(columns)
        if 2 * len(columns) < self._num_kept:
            return v @ self._kept[places]
        of_kept = np.zeros(self._num_kept)
        of_kept[places] = v
        return of_kept @ self._kept[: self._num_kept]

    def _places(self, features: Indices) -> Indices:
        """Where the rows of features are kept."""
        new = features[self._place[features] < 0]
        if len(new):
            if (self._num_kept + len(new)) * len(self.linear) > MOST_KEPT:
                self._place[:], self._num_kept, new = -1, 0, features
            self._keep(new)
        return self._place[features]

    def _keep(self, new: Indices) -> None:
        start, stop = self._num_kept, self._num_kept + len(new)
        if stop > len(self._kept):
            longer = np.empty((max(stop, 2 * len(self._kept)), len(self.linear)))
            longer[:start] = self._kept[:start]
            self._kept = longer
        self._kept[start:stop] = self._projected(self._features(new)).T
        self._place[new] = np.arange(start, stop)
        self._num_kept = stop

    def _projected(self, z: Array) -> Array:
        """Zᵀ z, of a vector or of columns."""
        return self._projected_on(self.X, z, self.mean, self.scale)

    def _product(self, rows: Indices, columns: Indices) -> Array:
        """A block of R, of which only the rows become dense where X is sparse."""
        z = self._features(rows)
        if not sparse.issparse(self.X):
            return z.T @ self._features(columns)
        return self._projected_on(self.X[:, columns], z, self.mean[columns], self.scale[columns]).T

    def _projected_on(self, X: Any, z: Array, mean: Array, scale: Array) -> Array:
        root = np.sqrt(self.weight)
        weighted = root * z if z.ndim == 1 else root[:, None] * z
        sums = weighted.sum(axis=0)
        if z.ndim == 1:
            return (X.T @ weighted - mean * sums) / scale
        product = X.T @ weighted if sparse.issparse(X) else (weighted.T @ X).T
        return (product - np.outer(mean, sums)) / scale[:, None]

    def _features(self, columns: Indices) -> Array:
        X = self.X[:, columns]
        dense = X.toarray() if sparse.issparse(X) else np.asarray(X)
        dense = (dense - self.mean[columns]) / self.scale[columns]
        return dense * np.sqrt(self.weight)[:, None]
