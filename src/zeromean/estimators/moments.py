"""Sufficient statistics of a regression: what a pass over the rows leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from zeromean.estimators.penalty import Array


@dataclass(frozen=True)
class Moments:
    """Weighted count, means, and second moments about the means, of features and target.

    They add: `Moments.of(X1, ...) + Moments.of(X2, ...)` are those of the rows together. Second
    moments are about the means of the part, so a large offset of a feature costs no digits.
    """

    count: float
    mean: Array  # (features,)
    target_mean: float
    gram: Array  # (features, features)
    cross: Array  # (features,)
    target_square: float

    @classmethod
    def of(cls, X: Any, target: Array, weight: Array | None) -> Moments:
        """Of a chunk of rows, dense or sparse."""
        if sparse.issparse(X):
            return cls._of_sparse(X.tocsr(), target, weight)
        X = np.asarray(X, dtype=np.float64)
        if weight is None:
            return cls._of_equals(X, target)
        count = float(weight.sum())
        if count == 0:
            return cls.empty(X.shape[1])
        mean, target_mean = weight @ X / count, float(weight @ target / count)
        root = np.sqrt(weight)
        deviations, residual = (X - mean) * root[:, None], (target - target_mean) * root
        return cls(
            count,
            mean,
            target_mean,
            deviations.T @ deviations,
            residual @ deviations,
            float(residual @ residual),
        )

    @classmethod
    def _of_equals(cls, X: Array, target: Array) -> Moments:
        count = len(X)
        mean, target_mean = np.ones(count) @ X / count, float(target.mean())
        residual = target - target_mean
        square, gram = float(residual @ residual), X.T @ X
        if (2 * count * mean**2 <= gram.diagonal()).all():
            # Means this small cost a digit at most, and a copy is saved.
            gram -= count * np.outer(mean, mean)
            return cls(float(count), mean, target_mean, gram, residual @ X, square)
        deviations = X - mean
        gram = deviations.T @ deviations
        return cls(float(count), mean, target_mean, gram, residual @ deviations, square)

    @classmethod
    def _of_sparse(cls, X: Any, target: Array, weight: Array | None) -> Moments:
        weight = np.ones(X.shape[0]) if weight is None else weight
        count = float(weight.sum())
        if count == 0:
            return cls.empty(X.shape[1])
        mean, target_mean = X.T @ weight / count, float(weight @ target / count)
        weighted = sparse.diags_array(weight) @ X
        residual = target - target_mean
        gram = (X.T @ weighted).toarray()
        return cls(
            count,
            mean,
            target_mean,
            gram - count * np.outer(mean, mean),
            weighted.T @ residual,
            float(weight @ residual**2),
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
        """The same rows about 0 instead of about their means: a model without intercept."""
        return Moments(
            self.count,
            np.zeros_like(self.mean),
            0.0,
            self.gram + self.count * np.outer(self.mean, self.mean),
            self.cross + self.count * self.target_mean * self.mean,
            self.target_square + self.count * self.target_mean**2,
        )


@dataclass(frozen=True)
class Overview:
    """What a classifier has to know before it starts: scales of the features, weights of classes.

    They add, like `Moments`, but stay small where features are many.
    """

    count: float
    mean: Array
    square: Array  # Σ weight (x - mean)²
    class_weight: dict[Any, float]

    @classmethod
    def of(cls, X: Any, y: Any, weight: Array | None) -> Overview:
        weight = np.ones(X.shape[0]) if weight is None else weight
        labels, places = np.unique(y, return_inverse=True)
        class_weight = dict(zip(labels.tolist(), np.bincount(places, weight).tolist(), strict=True))
        count = float(weight.sum())
        if count == 0:
            zeros = np.zeros(X.shape[1])
            return cls(0.0, zeros, zeros, class_weight)
        if sparse.issparse(X):
            mean = X.T @ weight / count
            square = np.maximum(X.power(2).T @ weight - count * mean**2, 0)
        else:
            X = np.asarray(X, dtype=np.float64)
            mean = weight @ X / count
            square = weight @ (X - mean) ** 2
        return cls(count, mean, square, class_weight)

    def __add__(self, other: Overview) -> Overview:
        class_weight = dict(self.class_weight)
        for label, weight in other.class_weight.items():
            class_weight[label] = class_weight.get(label, 0.0) + weight
        count = self.count + other.count
        if self.count == 0 or other.count == 0:
            larger = self if other.count == 0 else other
            return Overview(count, larger.mean, larger.square, class_weight)
        share, shift = other.count / count, other.mean - self.mean
        square = self.square + other.square + self.count * share * shift**2
        return Overview(count, self.mean + share * shift, square, class_weight)
