"""Features in units of their deviations, a chunk of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.rows.offsets import offset_of, take_off


@dataclass(frozen=True)
class Scaling:
    """What makes a feature one of mean 0 and variance 1; an infinite scale makes it zero."""

    mean: Array
    scale: Array


class Features:
    """Z = (X - mean) / scale of a chunk of rows; a sparse one stays sparse."""

    def __init__(self, X: Any, scaling: Scaling):
        self.sparse = sparse.issparse(X)
        self.mean, self.scale = scaling.mean, scaling.scale
        self._last: tuple[Indices, Array] | None = None
        if self.sparse:
            offset = offset_of(self.mean, self.mean**2 + self.scale**2)
            # By columns: those that are chosen cost what they have that is not zero.
            self.X = take_off(X, offset).tocsc()
            self.mean = self.mean - offset
        else:
            self.X: Any = (np.asarray(X, dtype=np.float64) - self.mean) / self.scale

    def columns(self, chosen: Indices) -> Array:
        """Z[:, chosen], dense."""
        if not self.sparse:
            return self.X[:, chosen]
        # A pass over the rows asks for the same ones several times, and so does the next pass.
        if self._last is not None and np.array_equal(chosen, self._last[0]):
            return self._last[1]
        dense = self.X[:, chosen].toarray()
        dense -= self.mean[chosen]
        dense /= self.scale[chosen]
        self._last = chosen, dense
        return dense

    def forget(self) -> None:
        """Give up the memory of the columns asked for last."""
        self._last = None

    def product(self, chosen: Indices, weights: Array) -> Array:
        """Z[:, chosen] @ weights."""
        return self.columns(chosen) @ weights

    def project(self, pull: Array) -> Array:
        """Zᵀ pull."""
        if not self.sparse:
            return pull @ self.X
        return (self.X.T @ pull - self.mean * pull.sum()) / self.scale

    def project_squares(self, pull: Array) -> Array:
        """(Z²)ᵀ pull."""
        if not self.sparse:
            return pull @ self.X**2
        mean = self.mean
        squares = self.X.power(2).T @ pull - 2 * mean * (self.X.T @ pull) + mean**2 * pull.sum()
        return np.maximum(squares, 0) / self.scale**2
