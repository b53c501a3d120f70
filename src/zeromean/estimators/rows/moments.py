"""Sufficient statistics of a regression: what a pass over the rows leaves behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from scipy import sparse

from zeromean.estimators.array_types import Array
from zeromean.estimators.rows.offsets import offset_of, take_off
from zeromean.estimators.rows.sources import SLICE_SIZE, Chunk
from zeromean.estimators.rows.threads import one_blas_thread_each

# Shorter slices of wide rows would spend their time on the matrix that they add to.
ROWS_OF_A_SLICE = 1024
# BLAS computes products of long and narrow slices hardly faster in several threads than in one.
# From this many multiplications on, parts of the rows go to threads of ours.
FEWEST_PRODUCTS = 2**26


@dataclass(frozen=True)
class Moments:
    """Weighted count, means, and second moments about the means, of features and target.

    They add: `Moments.of(first) + Moments.of(second)` are those of the rows together. Second
    moments are about the means of the part, so a large offset of a feature costs no digits.
    """

    count: float
    mean: Array  # (features,)
    target_mean: float
    gram: Array  # (features, features)
    cross: Array  # (features,)
    target_square: float

    @classmethod
    def of(cls, rows: Chunk) -> Moments:
        """The moments of rows, which may be on disk: they are read once, in slices."""
        shift = _typical_row(rows)
        squares = _sparse_squares if sparse.issparse(rows.X) else _squares
        # Products of features, target and 1, less the shift.
        second = squares(rows, shift)
        count, sums = float(second[-1, -1]), second[-1, :-1]
        if count == 0:
            return cls.empty(len(shift) - 1)
        mean = shift + sums / count
        centred = second[:-1, :-1] - np.outer(sums / count, sums)
        return cls(
            count,
            mean[:-1],
            float(mean[-1]),
            centred[:-1, :-1],
            centred[-1, :-1],
            float(centred[-1, -1]),
        )

    @classmethod
    def empty(cls, num_features: int) -> Moments:
        zeros = np.zeros(num_features)
        return cls(0.0, zeros, 0.0, np.zeros((num_features, num_features)), zeros, 0.0)

    def __add__(self, other: Moments) -> Moments:
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        count = self.count + other.count
        share = other.count / count
        shift, target_shift = other.mean - self.mean, other.target_mean - self.target_mean
        factor = self.count * share
        gram = self.gram + other.gram
        gram += np.outer(factor * shift, shift)
        return Moments(
            count,
            self.mean + share * shift,
            self.target_mean + share * target_shift,
            gram,
            self.cross + other.cross + factor * target_shift * shift,
            self.target_square + other.target_square + factor * target_shift**2,
        )

    def is_finite(self) -> bool:
        return bool(np.isfinite(self.gram).all() and np.isfinite(self.target_square))

    def about_zero(self) -> Moments:
        """The same rows about 0 instead of about their means: a model without intercept.

        Infinite where squares of the means are too large for float64.
        """
        target_mean = np.float64(self.target_mean)  # Python's powers raise where numpy's do not.
        with np.errstate(over="ignore", invalid="ignore"):
            return Moments(
                self.count,
                np.zeros_like(self.mean),
                0.0,
                self.gram + self.count * np.outer(self.mean, self.mean),
                self.cross + self.count * target_mean * self.mean,
                float(self.target_square + self.count * target_mean**2),
            )


def _typical_row(rows: Chunk) -> Array:
    """About the means of features and target: near enough that squares about it do not cancel."""
    X, y, weight, _ = rows
    if sparse.issparse(X):
        weight = rows.weights()
        count = max(float(weight.sum()), np.finfo(np.float64).tiny)
        means = X.T @ weight / count, X.power(2).T @ weight / count
        return np.append(offset_of(*means), y @ weight / count)
    # Rows without a weight may be anything.
    few: Any = slice(ROWS_OF_A_SLICE)
    few = few if weight is None else np.flatnonzero(weight)[few]
    if not len(y[few]):
        return np.zeros(X.shape[1] + 1)
    return np.append(X[few].mean(axis=0, dtype=np.float64), y[few].mean())


def _squares(rows: Chunk, shift: Array) -> Array:
    """Σ weight · row rowᵀ of dense rows, less the shift and with a 1 at the end."""
    size = len(shift) + 1
    # A part has more numbers than the matrix that it leaves behind.
    most_parts = len(rows.X) // max(size, ROWS_OF_A_SLICE)
    if most_parts < 2 or len(rows.X) * size**2 < FEWEST_PRODUCTS:
        return _squares_in_slices(rows, shift)
    with one_blas_thread_each() as num_threads:
        edges = np.linspace(0, len(rows.X), min(num_threads, most_parts) + 1).astype(int)
        parts = [rows.part(slice(*pair)) for pair in pairwise(edges)]
        if len(parts) == 1:
            return _squares_in_slices(rows, shift)
        with ThreadPoolExecutor(len(parts)) as threads:
            return np.sum(list(threads.map(_squares_in_slices, parts, repeat(shift))), axis=0)


def _squares_in_slices(rows: Chunk, shift: Array) -> Array:
    X, y, weight, _ = rows
    num_features = X.shape[1]
    num_rows = min(max(SLICE_SIZE // (2 * num_features), ROWS_OF_A_SLICE), len(X))
    # A shift for every row: numpy takes twice as long to repeat one.
    shifts = np.tile(shift[:-1], (num_rows, 1))
    features, others = np.empty((num_rows, num_features)), np.empty((2, num_rows))
    product = np.empty((num_features, num_features))
    squares, cross, rest = np.zeros_like(product), np.zeros((2, num_features)), np.zeros((2, 2))
    for start in range(0, len(X), num_rows):
        part = slice(start, start + num_rows)
        count = len(X[part])
        here, target = features[:count], others[:, :count]
        np.subtract(X[part], shifts[:count], out=here)
        np.subtract(y[part], shift[-1], out=target[0])
        target[1] = 1
        if weight is not None:
            root = np.sqrt(weight[part])
            here *= root[:, None]
            target *= root
        # numpy knows a product with the own transpose, computes half of it, and other threads can
        # run meanwhile, unlike with scipy's dsyrk.
        squares += np.matmul(here.T, here, out=product)
        cross += target @ here
        rest += target @ target.T
    return np.block([[squares, cross.T], [cross, rest]])


def _sparse_squares(rows: Chunk, shift: Array) -> Array:
    X = take_off(rows.X, shift[:-1])
    others = np.column_stack([rows.y - shift[-1], np.ones(len(rows.y))])
    augmented = sparse.hstack([X, sparse.csr_array(others)], format="csr")
    return (augmented.T @ (sparse.diags_array(rows.weights()) @ augmented)).toarray()
