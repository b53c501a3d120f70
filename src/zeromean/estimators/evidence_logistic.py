"""The relevance vector machine for classification: Gaussian-KL ARD.

The weights have priors N(0, 1/α) and a normal posterior with a full covariance; posterior and α
maximise the lower bound of the evidence, Σ E log σ(±m + s y) - KL, less a price for each feature in
the model. About the current posterior the data term is quadratic, with the average curvature as its
Hessian: what is left is evidence maximisation for a quadratic, which `evidence` does exactly. Where
its solution would lower the bound, the posterior alone takes a shorter step, and α follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zeromean.estimators.dropout import NoiseTerm
from zeromean.estimators.evidence import EvidenceSolution, maximize_evidence
from zeromean.estimators.logistic import (
    Curvatures,
    Features,
    Integral,
    Scaling,
    Slopes,
    curvatures,
    slopes,
)
from zeromean.estimators.penalty import Array
from zeromean.estimators.prices import Prices
from zeromean.estimators.quadratic import Indices, MatrixQuadratic
from zeromean.estimators.rows import Rows

NO_NOISE = NoiseTerm(count=0.0, square=0.0, fixed=True)
FEWEST_ENTRIES = 10
HALVINGS = 12


@dataclass(frozen=True)
class EvidencePosterior:
    """Correlated weights of the features in the model, and their prior precisions."""

    features: Indices
    mean: Array
    covariance: Array
    prior_precision: Array
    intercept: float

    def logit_variance(self, features: Features) -> Array:
        columns = features.columns(self.features)
        return np.einsum("ij,ij->i", columns @ self.covariance, columns)

    def doubled(self) -> EvidencePosterior:
        """The same in larger units: its KL is the same, and separable rows like it better."""
        return EvidencePosterior(
            self.features,
            2 * self.mean,
            4 * self.covariance,
            self.prior_precision / 4,
            2 * self.intercept,
        )

    def kl(self) -> float:
        second_moment = self.mean**2 + self.covariance.diagonal()
        _, log_det = np.linalg.slogdet(self.covariance)
        distance = self.prior_precision @ second_moment - len(self.mean)
        return float(0.5 * (distance - log_det - np.log(self.prior_precision).sum()))


@dataclass
class EvidenceFit:
    posterior: EvidencePosterior
    bound: list[float]
    num_iterations: int = 0
    converged: bool = False


def fit_evidence_logistic(
    rows: Rows,
    label: object,
    scaling: Scaling,
    integral: Integral,
    *,
    start_intercept: float,
    fit_intercept: bool,
    prices: Prices,
    max_iter: int,
    tol: float,
) -> EvidenceFit:
    """Maximise the bound for one class against the rest, until a step gains less than `tol`."""

    def slopes_at(posterior: EvidencePosterior) -> Slopes:
        return rows.reduce(slopes, label, scaling, posterior, integral)

    posterior = EvidencePosterior(
        np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros((0, 0)), np.zeros(0), start_intercept
    )
    at = slopes_at(posterior)
    fit = EvidenceFit(posterior, [at.value])
    while fit.num_iterations < max_iter:
        fit.num_iterations += 1
        before = fit.posterior
        chosen = _working_set(before, at)
        hessian = rows.reduce(curvatures, label, scaling, before, integral, chosen)
        model = _QuadraticModel.of(before, at, hessian, chosen, fit_intercept)
        trials = model.trials(prices)
        if fit.num_iterations % 10 == 0:
            trials = itertools.chain([before.doubled()], trials)
        for trial in trials:
            at_trial = slopes_at(trial)
            bound = at_trial.value - trial.kl() - prices.total(len(trial.features))
            if bound > fit.bound[-1]:
                break
        else:  # Rounding errors are all that is left.
            fit.converged = True
            break
        fit.posterior, at = trial, at_trial
        gain = bound - fit.bound[-1]
        fit.bound.append(bound)
        if gain < tol:
            fit.converged = True
            break
    return fit


def _working_set(posterior: EvidencePosterior, at: Slopes) -> Indices:
    """The features in the model, and those outside that pull the most."""
    pull = np.zeros_like(at.slope)
    varying = at.spread > 0
    pull[varying] = at.slope[varying] ** 2 / at.spread[varying]
    pull[posterior.features] = 0
    limit = max(FEWEST_ENTRIES, len(posterior.features))
    outside = np.argsort(-pull)[:limit]
    return np.concatenate([posterior.features, outside[pull[outside] > 1]])


@dataclass(frozen=True)
class _QuadraticModel:
    """The data term about a posterior: features, its matrix and its slope there, in unit scale."""

    before: EvidencePosterior
    chosen: Indices
    start: Array
    block: Array
    slope: Array
    root: Array
    hessian: Curvatures
    intercept_slope: float
    fit_intercept: bool

    @classmethod
    def of(
        cls,
        before: EvidencePosterior,
        at: Slopes,
        hessian: Curvatures,
        chosen: Indices,
        fit_intercept: bool,
    ) -> _QuadraticModel:
        slope, block = at.slope[chosen], hessian.block
        if fit_intercept:  # It follows the weights.
            block = block - np.outer(hessian.column, hessian.column) / hessian.corner
            slope = slope - hessian.column * (at.intercept_slope / hessian.corner)
        start = np.concatenate([before.mean, np.zeros(len(chosen) - len(before.mean))])
        root = np.sqrt(at.spread[chosen])
        return cls(
            before, chosen, start, block, slope, root, hessian, at.intercept_slope, fit_intercept
        )

    def trials(self, prices: Prices) -> Iterator[EvidencePosterior]:
        """Posteriors to try, the boldest first."""
        optimum = self._optimum(prices)
        yield optimum
        if np.array_equal(optimum.features, self.before.features):
            for halving in range(1, 5):
                yield self._between(optimum, 0.5**halving)
        for halving in range(HALVINGS):
            yield self._posterior_step(0.5**halving)

    def _optimum(self, prices: Prices) -> EvidencePosterior:
        matrix = self.block / np.outer(self.root, self.root)
        linear = matrix @ (self.start * self.root) + self.slope / self.root
        size = len(self.before.features)
        solution = maximize_evidence(
            MatrixQuadratic(matrix, linear),
            NO_NOISE,
            EvidenceSolution(
                np.arange(size), self.before.prior_precision / self.root[:size] ** 2, 1.0
            ),
            prices=prices,
            max_iter=50,
            tol=1e-7,
        )
        kept = solution.features
        root = self.root[kept]
        mean = np.zeros_like(self.start)
        mean[kept] = solution.mean / root
        covariance = solution.covariance / np.outer(root, root)
        return EvidencePosterior(
            self.chosen[kept],
            mean[kept],
            covariance,
            solution.precision * root**2,
            self._intercept(mean),
        )

    def _between(self, optimum: EvidencePosterior, share: float) -> EvidencePosterior:
        """A point on the way to the optimum, straight in means and precisions."""
        before = self.before
        precision = (1 - share) * np.linalg.inv(before.covariance)
        precision += share * np.linalg.inv(optimum.covariance)
        return EvidencePosterior(
            before.features,
            (1 - share) * before.mean + share * optimum.mean,
            np.linalg.inv(precision),
            before.prior_precision ** (1 - share) * optimum.prior_precision**share,
            (1 - share) * before.intercept + share * optimum.intercept,
        )

    def _posterior_step(self, share: float) -> EvidencePosterior:
        """A natural-gradient step of mean and covariance, features kept; then α at its optimum."""
        before, size = self.before, len(self.before.features)
        alpha = before.prior_precision
        precision = (1 - share) * np.linalg.inv(before.covariance)
        precision += share * (self.block[:size, :size] + np.diag(alpha))
        covariance = np.linalg.inv(precision)
        slope = self.slope[:size] - alpha * before.mean
        mean = self.start.copy()
        mean[:size] += share * covariance @ slope
        best_alpha = 1 / (mean[:size] ** 2 + covariance.diagonal())
        return EvidencePosterior(
            before.features, mean[:size], covariance, best_alpha, self._intercept(mean)
        )

    def _intercept(self, mean: Array) -> float:
        if not self.fit_intercept:
            return self.before.intercept
        pull = self.intercept_slope - self.hessian.column @ (mean - self.start)
        return self.before.intercept + float(pull / self.hessian.corner)
