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

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.ascent import Ascent, Proposal, ascend
from zeromean.estimators.evidence.feature_prior import FREE, Prices, nearly_free
from zeromean.estimators.evidence.search import (
    ROUGHLY,
    VERY_ROUGHLY,
    EvidenceSolution,
    maximize_evidence,
    with_all_that_matter,
)
from zeromean.estimators.likelihoods.logistic import DataTerm, QuadraticModel, Slopes, pulls
from zeromean.estimators.likelihoods.noise_term import NO_NOISE
from zeromean.estimators.likelihoods.quadratic import MOST_INVERTED
from zeromean.estimators.rows.columns import Features

FEWEST_ENTRIES = 10
HALVINGS = 12
ROUNDING = 1e-10
# Iterations in a row with small gains, after which the fit ends: gains may grow again.
PATIENCE = 3
# How often, in iterations, larger units are tried.
DOUBLING_PERIOD = 10


@dataclass(frozen=True)
class EvidencePosterior:
    """Correlated weights of the features in the model, and their prior precisions.

    The intercept, which has no prior, follows the weights: where they vary, log-odds stay the same
    at `centre`. A fixed intercept would bind the weights more than the data do.
    """

    features: Indices
    mean: Array
    covariance: Array
    prior_precision: Array
    centre: Array
    intercept: float  # given the means

    @classmethod
    def empty(cls, intercept: float) -> EvidencePosterior:
        nothing = np.zeros(0)
        features = np.zeros(0, dtype=np.intp)
        return cls(features, nothing, np.zeros((0, 0)), nothing, nothing, intercept)

    def logit_variance(self, features: Features) -> Array:
        columns = features.columns(self.features) - self.centre
        variance = np.einsum("ij,ij->i", columns @ self.covariance, columns)
        # A trial whose covariance is none has no bound either; what rounding leaves is zero.
        rounding = ROUNDING * (columns**2 @ np.abs(self.covariance.diagonal()))
        return np.where(variance < -rounding, np.nan, np.maximum(variance, 0))

    def doubled(self) -> EvidencePosterior:
        """The same in larger units: its KL is the same, and separable rows like it better."""
        return EvidencePosterior(
            self.features,
            2 * self.mean,
            4 * self.covariance,
            self.prior_precision / 4,
            self.centre,
            2 * self.intercept,
        )

    def kl(self) -> float:
        second_moment = self.mean**2 + self.covariance.diagonal()
        _, log_det = np.linalg.slogdet(self.covariance)
        distance = self.prior_precision @ second_moment - len(self.mean)
        return float(0.5 * (distance - log_det - np.log(self.prior_precision).sum()))


def search_evidence_logistic(
    term: DataTerm, *, prices: Prices, max_iter: int, tol: float
) -> Ascent[EvidencePosterior]:
    """The better of two optima for one class against the rest, as in `search_evidence`.

    From the empty model, and from all features that have evidence or, where these cannot be told
    apart, from those that enter at a lower price.
    """
    empty = EvidencePosterior.empty(term.start_intercept)
    forward = _fit(term, empty, prices, max_iter, tol)
    model = QuadraticModel.of_all_features(term, forward.posterior)
    if model is None and min(term.num_varying, term.count) > MOST_INVERTED:
        return forward
    if model is None:
        # Left to itself it would go on to separate the rows, by features that mean nothing.
        rough = _fit(term, empty, nearly_free(prices), max_iter, VERY_ROUGHLY, patience=1)
        more = rough.posterior
    else:
        start = _solution(model, forward.posterior)
        start = with_all_that_matter(model.quadratic, NO_NOISE, start)
        larger = _posterior(model, _maximum(model, start, FREE))
        more = _fit(term, larger, FREE, max_iter, ROUGHLY).posterior
    backward = _fit(term, more, prices, max_iter, tol)
    return backward if backward.bound[-1] > forward.bound[-1] else forward


def _fit(
    term: DataTerm,
    start: EvidencePosterior,
    prices: Prices,
    max_iter: int,
    tol: float,
    patience: int = PATIENCE,
) -> Ascent[EvidencePosterior]:
    iterations = itertools.count(1)

    def propose(before: EvidencePosterior, at: Slopes) -> Proposal[EvidencePosterior]:
        trials = _trials(term, before, at, prices)
        if next(iterations) % DOUBLING_PERIOD == 0:
            trials = itertools.chain([before.doubled()], trials)
        return Proposal(trials)

    def cost(posterior: EvidencePosterior) -> float:
        return posterior.kl() + prices.total(len(posterior.features))

    return ascend(term, start, propose, cost, max_iter=max_iter, tol=tol, patience=patience)


def _trials(
    term: DataTerm, before: EvidencePosterior, at: Slopes, prices: Prices
) -> Iterator[EvidencePosterior]:
    model = QuadraticModel.about(term, before, at, _working_set(before, at))
    if model is None:
        return
    optimum = _posterior(model, _maximum(model, _solution(model, before), prices))
    yield optimum
    if np.array_equal(optimum.features, before.features):
        for halving in range(1, 5):
            yield _between(before, optimum, 0.5**halving)
    for halving in range(HALVINGS):
        yield _posterior_step(model, before, 0.5**halving)


def _working_set(posterior: EvidencePosterior, at: Slopes) -> Indices:
    """The features in the model, and those outside that pull the most."""
    pull = pulls(posterior, at)
    outside = np.argsort(-pull)[: max(FEWEST_ENTRIES, len(posterior.features))]
    return np.concatenate([posterior.features, outside[pull[outside] > 1]])


def _maximum(model: QuadraticModel, start: EvidenceSolution, prices: Prices) -> EvidenceSolution:
    return maximize_evidence(model.quadratic, NO_NOISE, start, prices=prices, max_iter=50, tol=1e-7)


def _solution(model: QuadraticModel, posterior: EvidencePosterior) -> EvidenceSolution:
    """A posterior in the units of the quadratic model about it."""
    size = len(posterior.features)
    precision = posterior.prior_precision / model.root[:size] ** 2
    return EvidenceSolution(np.arange(size), precision, noise_precision=1.0)


def _posterior(model: QuadraticModel, solution: EvidenceSolution) -> EvidencePosterior:
    kept = solution.features
    root = model.root[kept]
    mean = np.zeros_like(model.start)
    mean[kept] = solution.mean / root
    return EvidencePosterior(
        model.chosen[kept],
        mean[kept],
        solution.covariance / np.outer(root, root),
        solution.precision * root**2,
        model.centre[kept],
        model.intercept(mean),
    )


def _between(
    before: EvidencePosterior, optimum: EvidencePosterior, share: float
) -> EvidencePosterior:
    """A point on the way to the optimum, straight in means and precisions."""
    precision = (1 - share) * np.linalg.inv(before.covariance)
    precision += share * np.linalg.inv(optimum.covariance)
    return EvidencePosterior(
        before.features,
        (1 - share) * before.mean + share * optimum.mean,
        np.linalg.inv(precision),
        before.prior_precision ** (1 - share) * optimum.prior_precision**share,
        (1 - share) * before.centre + share * optimum.centre,
        (1 - share) * before.intercept + share * optimum.intercept,
    )


def _posterior_step(
    model: QuadraticModel, before: EvidencePosterior, share: float
) -> EvidencePosterior:
    """A natural-gradient step of mean and covariance, features kept; then α at its optimum."""
    size, alpha, root = len(before.features), before.prior_precision, model.root
    block = model.matrix[:size, :size] * np.outer(root[:size], root[:size])
    precision = (1 - share) * np.linalg.inv(before.covariance) + share * (block + np.diag(alpha))
    covariance = np.linalg.inv(precision)
    slope = model.linear - model.matrix @ (model.start * root)
    slope = (slope * root)[:size] - alpha * before.mean
    mean = model.start.copy()
    mean[:size] += share * covariance @ slope
    best_alpha = 1 / (mean[:size] ** 2 + covariance.diagonal())
    centre, intercept = model.centre[:size], model.intercept(mean)
    return EvidencePosterior(
        before.features, mean[:size], covariance, best_alpha, centre, intercept
    )
