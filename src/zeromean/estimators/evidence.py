"""Evidence maximisation for a quadratic data term: the solver behind the relevance vector machines.

Each weight has a prior N(0, 1 / (a β)) with a precision of its own, and a price in nats for being
in the model at all, which is the log of the prior odds against it. With V = (R + diag(a))⁻¹ and
mean V b, maximise over the set of features, their a, and the noise precision β

    ½ [count log β - β (c - bᵀ V b) + log det V + Σ log a] - prices of the features.

For a single feature, given the others, this has a closed form (Tipping & Faul, 2003): with s and q
what the others leave of its square and of its correlation with the target, it belongs to the model
if ½ (β q²/s - 1 - log(β q²/s)) exceeds the price, at a = s² / (β q² - s). Features enter, leave and
move by it, one at a time; Newton steps in all log a together make the convergence quadratic.
"""

# scipy makes its BLAS and LAPACK functions at run time.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.blas import dger
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs

from zeromean.estimators.dropout import NoiseTerm
from zeromean.estimators.penalty import Array
from zeromean.estimators.prices import FixedPrice, Prices
from zeromean.estimators.quadratic import Indices, Quadratic

SCORED_AT_ONCE = 4096
# How far above 1 a feature's β q²/s has to be, at no price, for its prior to be proper.
MARGIN = 1e-9
# What is left of the square of a feature that others explain: a copy leaves rounding errors.
SMALLEST_SHARE = 1e-9


@dataclass
class EvidenceSolution:
    """The features in the model, in order of entry, with precision, mean and covariance (÷ β)."""

    features: Indices
    precision: Array  # a
    noise_precision: float
    mean: Array = field(default_factory=lambda: np.zeros(0))
    covariance: Array = field(default_factory=lambda: np.zeros((0, 0)))
    objective: list[float] = field(default_factory=list)
    num_iterations: int = 0
    converged: bool = False

    @classmethod
    def empty(cls, noise_precision: float) -> EvidenceSolution:
        return cls(np.zeros(0, dtype=np.intp), np.zeros(0), noise_precision)

    def restart(self) -> EvidenceSolution:
        return EvidenceSolution(self.features, self.precision.copy(), self.noise_precision)


def search_evidence(
    quadratic: Quadratic,
    noise: NoiseTerm,
    noise_precision: float,
    *,
    prices: Prices,
    max_iter: int,
    tol: float,
) -> EvidenceSolution:
    """The better of two optima: from the empty model, and from what half the price adds to it.

    From nothing, the first of many features that are relevant together may not be worth its price.
    """
    forward = EvidenceSolution.empty(noise_precision)
    maximize_evidence(quadratic, noise, forward, prices=prices, max_iter=max_iter, tol=tol)
    half = FixedPrice(prices.of_one_more(0) / 2)
    more = forward.restart()
    maximize_evidence(quadratic, noise, more, prices=half, max_iter=max_iter, tol=0.01)
    if set(more.features) <= set(forward.features):
        return forward
    backward = more.restart()
    maximize_evidence(quadratic, noise, backward, prices=prices, max_iter=max_iter, tol=tol)
    return forward if forward.objective[-1] >= backward.objective[-1] else backward


def maximize_evidence(
    quadratic: Quadratic,
    noise: NoiseTerm,
    solution: EvidenceSolution,
    *,
    prices: Prices,
    max_iter: int,
    tol: float,
) -> EvidenceSolution:
    """Improve a solution in place until an iteration gains less than `tol` nats."""
    model = _Model.build(
        quadratic, noise, prices, solution.features, solution.precision, solution.noise_precision
    )
    solution.objective.append(model.objective())
    while solution.num_iterations < max_iter:
        solution.num_iterations += 1
        changed = model.admit(quadratic, _candidates(quadratic, model))
        changed |= model.expel()
        # Single updates accumulate rounding errors.
        model = model.rebuilt(quadratic)
        better = _newton_step(quadratic, model)
        if better is None:
            model.sweep()
            better = model.rebuilt(quadratic)
        model = better
        objective = model.objective()
        gain = objective - solution.objective[-1]
        solution.objective.append(max(objective, solution.objective[-1]))
        if gain < tol and not changed:
            solution.converged = True
            break
    solution.features, solution.precision = model.features, model.precision
    solution.mean, solution.covariance = model.mean, model.covariance
    solution.noise_precision = model.noise_precision
    return solution


def gain(ratio: Array | float) -> Array:
    """Nats of evidence that a feature with β q²/s = `ratio` adds at its best precision."""
    return np.where(ratio > 1, 0.5 * (ratio - 1 - np.log(np.maximum(ratio, 1))), 0.0)


@dataclass
class _Model:
    noise: NoiseTerm
    prices: Prices
    features: Indices
    precision: Array
    noise_precision: float
    block: Array  # R of the features
    linear: Array  # b of the features
    covariance: Array  # V
    mean: Array  # V b
    log_det: float  # of V, when it was built

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
    ) -> _Model:
        block = quadratic.block(features, features) if block is None else block
        linear = quadratic.linear[features]
        covariance, log_det = _inverse(block + np.diag(precision))
        model = cls(
            noise,
            prices,
            features,
            precision,
            noise_precision,
            block,
            linear,
            covariance,
            covariance @ linear,
            log_det,
        )
        if not noise.fixed:
            model.noise_precision = noise.count / model.misfit()
        return model

    def rebuilt(self, quadratic: Quadratic, precision: Array | None = None) -> _Model:
        return _Model.build(
            quadratic,
            self.noise,
            self.prices,
            self.features,
            self.precision if precision is None else precision,
            self.noise_precision,
            self.block,
        )

    def misfit(self) -> float:
        misfit = self.noise.square - float(self.linear @ self.mean)
        # Not below what rounding leaves of it.
        return misfit if self.noise.fixed else max(misfit, 1e-13 * self.noise.square)

    def objective(self) -> float:
        beta = self.noise_precision
        fit = self.noise.count * np.log(beta) - beta * self.misfit()
        complexity = self.log_det + np.log(self.precision).sum()
        return float(0.5 * (fit + complexity) - self.prices.total(len(self.features)))

    def admit(self, quadratic: Quadratic, candidates: Indices) -> bool:
        """Let candidates in, each if it is still worth its price after those before it."""
        changed = False
        for feature in candidates:
            index = np.array([feature])
            column = quadratic.block(self.features, index)[:, 0]
            square = float(quadratic.block(index, index)[0, 0])
            linear = float(quadratic.linear[feature])
            projected = self.covariance @ column
            s = square - float(column @ projected)
            q = linear - float(column @ self.mean)
            if s < SMALLEST_SHARE * square:
                continue
            ratio = self.noise_precision * q**2 / s
            if gain(ratio) <= self.prices.of_one_more(len(self.features)) or ratio <= 1 + MARGIN:
                continue
            a = s / (ratio - 1)
            self._insert(feature, column, square, projected, s, q, a, linear)
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
        linear: float,
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
        self.mean = np.append(self.mean - mean * projected, mean)
        self.covariance, self.block = covariance, block
        self.features = np.append(self.features, feature)
        self.precision = np.append(self.precision, a)
        self.linear = np.append(self.linear, linear)

    def expel(self) -> bool:
        """Put features out that are not worth their price, the worst first."""
        changed = False
        while len(self.features):
            gains = gain(self._ratios())
            worst = int(np.argmin(gains))
            if gains[worst] > self.prices.of_one_more(len(self.features) - 1):
                break
            self._change(worst, np.inf)
            kept = np.arange(len(self.features)) != worst
            self.features, self.precision = self.features[kept], self.precision[kept]
            self.mean, self.linear = self.mean[kept], self.linear[kept]
            self.block = self.block[np.ix_(kept, kept)]
            self.covariance = self.covariance[np.ix_(kept, kept)]
            changed = True
        return changed

    def sweep(self) -> None:
        """Move every precision to its optimum given the others."""
        for j in range(len(self.features)):
            variance = self.covariance[j, j]
            s = 1 / variance - self.precision[j]
            ratio = self._ratios()[j]
            if ratio > 1 + MARGIN:
                self._change(j, s / (ratio - 1))

    def _ratios(self) -> Array:
        """β q²/s of every feature, given the others; 0 for what the others explain completely."""
        variance = self.covariance.diagonal()
        s = 1 / variance - self.precision
        q = self.mean / variance
        own = s > SMALLEST_SHARE * self.block.diagonal()
        return np.where(own, self.noise_precision * q**2 / np.where(own, s, 1), 0)

    def _change(self, j: int, precision: float) -> None:
        row = self.covariance[j].copy()
        change = precision - self.precision[j]
        share = 1 / row[j] if np.isinf(change) else change / (1 + change * row[j])
        self.precision[j] = precision
        self.mean = self.mean - share * self.mean[j] * row
        # In place, on the transpose, since BLAS counts by columns.
        dger(-share, row, row, a=self.covariance.T, overwrite_a=True)


def _inverse(matrix: Array) -> tuple[Array, float]:
    """Inverse of a positive definite matrix, and the log determinant of that inverse."""
    if not len(matrix):
        return matrix, 0.0
    factor, failed = dpotrf(matrix, lower=True)
    if failed:
        raise LinAlgError("a matrix that should be is not positive definite")
    triangle, _ = dpotri(factor, lower=True)
    inverse = np.tril(triangle)
    inverse += np.tril(triangle, -1).T
    return inverse, -2 * float(np.log(factor.diagonal()).sum())


def _candidates(quadratic: Quadratic, model: _Model) -> Indices:
    """Features outside the model that are worth their price, the best first."""
    residual = quadratic.linear - quadratic.product(model.features, model.mean)
    num_features = len(residual)
    ratio = np.zeros(num_features)
    everything = np.arange(num_features)
    for start in range(0, num_features, SCORED_AT_ONCE):
        some = everything[start : start + SCORED_AT_ONCE]
        columns = quadratic.block(model.features, some)
        square = quadratic.diagonal[some]
        s = square - np.einsum("ij,ij->j", columns, model.covariance @ columns)
        safe = s > SMALLEST_SHARE * square
        ratio[some[safe]] = model.noise_precision * residual[some[safe]] ** 2 / s[safe]
    ratio[model.features] = 0
    gains = gain(ratio)
    price = model.prices.of_one_more(len(model.features))
    worthy = np.flatnonzero((gains > price) & (ratio > 1 + MARGIN))
    # Each that enters lowers the gains of the others: ask the rest again next time.
    limit = max(10, len(model.features))
    return worthy[np.argsort(-gains[worthy])[:limit]]


def _newton_step(quadratic: Quadratic, model: _Model) -> _Model | None:
    """One step in all log a, with the noise at its optimum; None where it does not help.

    In log a the gradient is ½ (1 - a V_jj - β a m²) and the Hessian's off-diagonal part is
    a_i a_j (½ V_ij² + β m_i m_j V_ij).
    """
    if not len(model.features):
        return model
    beta, a, mean = model.noise_precision, model.precision, model.mean
    covariance = model.covariance
    spread = a * (covariance.diagonal() + beta * mean**2)
    slope = 0.5 * (1 - spread)
    hessian = np.outer(a, a) * covariance * (0.5 * covariance + beta * np.outer(mean, mean))
    hessian[np.diag_indices_from(hessian)] -= 0.5 * spread
    if not model.noise.fixed:
        # The noise follows: β = count / misfit, d misfit / d log a = a m².
        pull = beta * a * mean**2
        hessian += 0.5 * np.outer(pull, pull) / model.noise.count
    objective = model.objective()
    factor, failed = dpotrf(-hessian, lower=True)
    if failed:
        return None
    move, _ = dpotrs(factor, slope, lower=True)
    # A precision that runs away is a feature on its way out, which `expel` decides.
    trial = model.rebuilt(quadratic, a * np.exp(np.clip(move, -6, 6)))
    return trial if trial.objective() > objective else None
