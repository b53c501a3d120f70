"""A model in the search for evidence: some features, their prior precisions, and the posterior.

With s and q what the others leave of a feature's square and of its correlation with the target, its
best precision is a = s² / (β q² - s), and it adds ½ (β q²/s - 1 - log(β q²/s)) to the log evidence
(Tipping & Faul, 2003): features enter, leave and move by it, one at a time. This is for a given β.
A learned one would grow with the feature, and the gain with it; where rows are few that would let
chance in, and so it is not counted.
"""

# scipy makes its BLAS and LAPACK functions at run time.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.blas import dger
from scipy.linalg.lapack import dpotrf, dpotri

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.evidence.feature_prior import Prices
from zeromean.estimators.likelihoods.noise_term import NoiseTerm
from zeromean.estimators.likelihoods.quadratic import Quadratic

# How far above 1 a feature's β q²/s has to be, at no price, for its prior to be proper.
MARGIN = 1e-9
# What is left of the square of a feature that others explain, and of one that is a copy.
SMALLEST_SHARE = 1e-12
# What makes a matrix positive definite that is so but for rounding, in parts of its diagonal.
RIDGES = (1e-14, 1e-13, 1e-12, 1e-11, 1e-10, 1e-9)


@dataclass
class EvidenceModel:
    """Mean and covariance are those of the posterior in units of its features, ÷ β."""

    noise: NoiseTerm
    prices: Prices
    features: Indices
    precision: Array
    noise_precision: float
    block: Array  # R of the features
    covariance: Array  # V
    mean: Array  # V b
    objective: float  # when it was built

    @classmethod
    def build(
        cls,
        quadratic: Quadratic,
        noise: NoiseTerm,
        prices: Prices,
        features: Indices,
        precision: Array,
        noise_precision: float,
        block: Array | None = None,
    ) -> EvidenceModel:
        block = quadratic.block(features, features) if block is None else block
        linear = quadratic.linear[features]
        matrix = block.copy()
        matrix.flat[:: len(matrix) + 1] += precision
        covariance, log_det = inverse(matrix)
        mean = covariance @ linear
        # Where features are nearly collinear, the inverse alone leaves too few digits.
        mean = mean + covariance @ (linear - matrix @ mean)
        # Its minimum is c - bᵀ V b; written so, an error of the mean counts by its square only.
        misfit = noise.square + float(
            mean @ (block @ mean - 2 * linear) + precision @ (mean * mean)
        )
        if not noise.fixed:
            misfit = max(misfit, 1e-13 * noise.square)  # Not below what rounding leaves of it.
            noise_precision = noise.count / misfit
        fit = noise.count * log(noise_precision) - noise_precision * misfit
        complexity = log_det + float(np.log(precision).sum())
        return cls(
            noise,
            prices,
            features,
            precision,
            noise_precision,
            block,
            covariance,
            mean,
            0.5 * (fit + complexity) - prices.total(len(features)),
        )

    def rebuilt(self, quadratic: Quadratic, precision: Array | None = None) -> EvidenceModel:
        return EvidenceModel.build(
            quadratic,
            self.noise,
            self.prices,
            self.features,
            self.precision if precision is None else precision,
            self.noise_precision,
            self.block,
        )

    def admit(self, quadratic: Quadratic, candidates: Indices, most_features: float) -> bool:
        """Let candidates in, each if it is still worth its price after those before it."""
        if not len(candidates):
            return False
        # Of those inside, and of those that may come to be, in the order of entry.
        columns = quadratic.block(np.concatenate([self.features, candidates]), candidates)
        inside = np.arange(len(self.features))
        changed = False
        for place, feature in enumerate(candidates):
            if len(self.features) >= most_features:
                break
            column = columns[inside, place]
            square = float(quadratic.diagonal[feature])
            linear = float(quadratic.linear[feature])
            projected = self.covariance @ column
            s = square - float(column @ projected)
            q = linear - float(column @ self.mean)
            # A copy of a feature inside adds nothing: the prior of that one can be as wide as two.
            squares = square * self.block.diagonal()
            if s < SMALLEST_SHARE * square or (column**2 > (1 - SMALLEST_SHARE) * squares).any():
                continue
            ratio = self.noise_precision * q**2 / s
            price = self.prices.of_one_more(len(self.features))
            if ratio <= 1 + MARGIN or gain(ratio) <= price:
                continue
            self._insert(feature, column, square, projected, s, q, s / (ratio - 1))
            inside = _longer(inside, len(columns) - len(candidates) + place)
            changed = True
        return changed

    def _insert(
        self,
        feature: int,
        column: Array,
        square: float,
        projected: Array,
        s: float,
        q: float,
        a: float,
    ) -> None:
        size = len(self.features)
        variance = 1 / (s + a)
        covariance = np.empty((size + 1, size + 1))
        covariance[:size, :size] = self.covariance + variance * np.outer(projected, projected)
        covariance[size, :size] = covariance[:size, size] = -variance * projected
        covariance[size, size] = variance
        block = np.empty((size + 1, size + 1))
        block[:size, :size] = self.block
        block[size, :size] = block[:size, size] = column
        block[size, size] = square
        mean = variance * q
        self.mean = _longer(self.mean - mean * projected, mean)
        self.covariance, self.block = covariance, block
        self.features = _longer(self.features, feature)
        self.precision = _longer(self.precision, a)

    def expel(self) -> bool:
        """Put features out that are not worth their price, the worst first."""
        kept = np.ones(len(self.features), dtype=bool)
        count = len(kept)
        while count:
            gains = np.where(kept, gain(self._ratios()), np.inf)
            worst = int(np.argmin(gains))
            if gains[worst] > self.prices.of_one_more(count - 1):
                break
            self._change(worst, np.inf)
            self.covariance[worst, worst] = 1  # Zero would be divided by.
            kept[worst] = False
            count -= 1
        if count == len(kept):
            return False
        left = np.flatnonzero(kept)
        self.features, self.precision = self.features[left], self.precision[left]
        self.mean = self.mean[left]
        self.block = self.block[left[:, None], left]
        self.covariance = self.covariance[left[:, None], left]
        return True

    def sweep(self) -> None:
        """Move every precision to its optimum given the others."""
        for j in range(len(self.features)):
            variance = float(self.covariance[j, j])
            s = 1 / variance - float(self.precision[j])
            if s <= SMALLEST_SHARE * float(self.block[j, j]):
                continue
            ratio = self.noise_precision * (float(self.mean[j]) / variance) ** 2 / s
            if ratio > 1 + MARGIN:
                self._change(j, s / (ratio - 1))

    def _ratios(self) -> Array:
        """β q²/s of every feature, given the others; 0 for what the others explain completely."""
        variance = self.covariance.diagonal()
        s = 1 / variance - self.precision
        q = self.mean / variance
        own = s > SMALLEST_SHARE * np.maximum(self.block.diagonal(), np.finfo(np.float64).tiny)
        return np.where(own, self.noise_precision * q**2 / np.where(own, s, 1), 0)

    def _change(self, j: int, precision: float) -> None:
        row = self.covariance[j].copy()
        change = precision - self.precision[j]
        share = 1 / row[j] if np.isinf(change) else change / (1 + change * row[j])
        self.precision[j] = precision
        self.mean = self.mean - share * self.mean[j] * row
        # On the transpose, since BLAS counts by columns: in place where it can be.
        self.covariance = dger(-share, row, row, a=self.covariance.T, overwrite_a=True).T


def _longer(array: Array, last: float) -> Array:
    """np.append, without what it does for other arguments."""
    longer = np.empty(len(array) + 1, dtype=array.dtype)
    longer[:-1] = array
    longer[-1] = last
    return longer


def gain(ratio: Array | float) -> Array:
    """Nats of evidence that a feature with β q²/s = `ratio` adds at its best precision."""
    return np.where(ratio > 1, 0.5 * (ratio - 1 - np.log(np.maximum(ratio, 1))), 0.0)


def inverse(matrix: Array) -> tuple[Array, float]:
    """Inverse of a positive definite matrix, and the log determinant of that inverse."""
    if not len(matrix):
        return matrix, 0.0
    factor, failed = dpotrf(matrix, lower=True)
    if failed:  # But for rounding it would be.
        largest = float(matrix.diagonal().max())
        for share in RIDGES:
            factor, failed = dpotrf(matrix + share * largest * np.eye(len(matrix)), lower=True)
            if not failed:
                break
        else:
            raise LinAlgError(
                "features are too much alike for float64; drop some of them, or say "
                "noise_precision= if there is hardly any noise"
            )
    triangle, _ = dpotri(factor, lower=True)  # The other one is zero.
    full = triangle + triangle.T
    full.flat[:: len(full) + 1] = triangle.diagonal()
    return full, -2 * float(np.log(factor.diagonal()).sum())
