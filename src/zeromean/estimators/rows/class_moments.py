"""What a classifier has to know before it starts: scales of the features, weights of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zeromean.estimators.array_types import Array
from zeromean.estimators.rows.magnitude import check_features
from zeromean.estimators.rows.offsets import mean_and_square
from zeromean.estimators.rows.sources import Chunk


@dataclass(frozen=True)
class Overview:
    """Weighted counts of rows and classes, means of features and squares about them.

    They add, like `Moments`, but stay small where features are many.
    """

    count: float
    mean: Array
    square: Array  # Σ weight (x - mean)²
    classes: Any
    class_count: Array

    @classmethod
    def of(cls, rows: Chunk) -> Overview:
        weight = rows.weights()
        count = float(weight.sum())
        mean = square = np.zeros(rows.X.shape[1])
        if count > 0:
            mean, square = mean_and_square(rows.X, weight, count)
            check_features(rows, square)
        return cls(count, mean, square, *_counted(rows.y, weight))

    def __add__(self, other: Overview) -> Overview:
        counted = _counted(
            np.concatenate([self.classes, other.classes]),
            np.concatenate([self.class_count, other.class_count]),
        )
        count = self.count + other.count
        if self.count == 0 or other.count == 0:
            larger = self if other.count == 0 else other
            return Overview(count, larger.mean, larger.square, *counted)
        share, shift = other.count / count, other.mean - self.mean
        square = self.square + other.square + self.count * share * shift**2
        return Overview(count, self.mean + share * shift, square, *counted)


def _counted(labels: Any, weight: Array) -> tuple[Any, Array]:
    classes, places = np.unique(labels, return_inverse=True)
    count = np.bincount(places.ravel(), weight, minlength=len(classes))
    # Rows without a weight are as good as absent, and so is a class that has no others.
    return classes[count > 0], count[count > 0]
