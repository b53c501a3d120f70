"""The posterior of variational dropout: independent normal weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.dropout.penalty import kl_divergence
from zeromean.estimators.rows.columns import Features


@dataclass(frozen=True)
class DropoutPosterior:
    """Independent weights of the features that are not exactly zero."""

    features: Indices
    mean: Array
    std: Array
    intercept: float

    @classmethod
    def empty(cls, intercept: float) -> DropoutPosterior:
        return cls(np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros(0), intercept)

    def part(self, kept: Array) -> DropoutPosterior:
        return DropoutPosterior(
            self.features[kept], self.mean[kept], self.std[kept], self.intercept
        )

    def logit_variance(self, features: Features) -> Array:
        return features.columns(self.features) ** 2 @ self.std**2

    def log_alpha(self) -> Array:
        return 2 * np.log(self.std / np.abs(self.mean))

    def kl(self) -> float:
        return float(kl_divergence(np.abs(self.mean) / (np.sqrt(2) * self.std)).sum())
