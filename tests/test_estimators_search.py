"""The optimum that is found, against all subsets of features and against general optimisers."""

import itertools

import numpy as np
import pytest
from scipy import optimize, stats
from scipy.special import expit, log_expit
from sklearn.base import clone

from zeromean.estimators import (
    RVMClassifier,
    RVMRegressor,
    VariationalDropoutClassifier,
    VariationalDropoutRegressor,
)

names = {"ids": str}


def make_difference(num_rows=300, num_features=15):
    """A signal that is the difference of two features nearly alike, neither of which shows it."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(num_rows, num_features))
    X[:, 1] = X[:, 0] + 0.05 * X[:, 1]
    return X, 60 * (X[:, 0] - X[:, 1]), rng


@pytest.mark.parametrize(
    "model",
    [
        VariationalDropoutRegressor(),
        VariationalDropoutRegressor(noise_precision=1.0),
        VariationalDropoutRegressor(noise_precision="elbo"),
        RVMRegressor(),
        RVMRegressor(threshold=0),
    ],
    **names,
)
def test_features_that_are_relevant_only_together_are_found(model):
    X, signal, rng = make_difference()
    y = signal + rng.normal(size=len(X))
    model = clone(model).fit(X, y)
    assert model.relevance_[:2].all()
    np.testing.assert_allclose(model.coef_[:2], [60, -60], atol=6)


@pytest.mark.parametrize(
    "model",
    [VariationalDropoutClassifier(), RVMClassifier(), RVMClassifier(threshold=0)],
    **names,
)
def test_features_that_separate_classes_only_together_are_found(model):
    X, signal, rng = make_difference()
    y = rng.random(len(X)) < expit(signal)
    model = clone(model).fit(X, y)
    assert model.relevance_[:2].all()
    assert model.score(X, signal > 0) > 0.95


def log_evidence(X, y, log_alpha):
    covariance = np.eye(len(y)) + X * np.exp(-log_alpha) @ X.T
    return stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y)


def best_log_evidence(X, y):
    """Maximised over the prior precisions of all features, by a general optimiser."""
    starts = [np.full(X.shape[1], start) for start in (-2.0, 2.0)]
    fits = [optimize.minimize(lambda r: -log_evidence(X, y, r), start) for start in starts]
    return -min(fit.fun for fit in fits)


def log_odds_against(num_features, size):
    """Of a set of so many features, if all sizes are equally likely, up to a constant."""
    return sum(max(np.log((num_features - n) / (n + 1)), 0) for n in range(size))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_machine_finds_the_best_of_all_sets_of_features(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(40, 5)) + 3 * rng.normal(size=(40, 1))
    y = X @ rng.choice([-1, 0, 1], 5) + rng.normal(size=40)
    X, y = X - X.mean(axis=0), y - y.mean()
    sets = [s for n in range(6) for s in itertools.combinations(range(5), n)]
    best = max(
        (best_log_evidence(X[:, list(s)], y) if s else log_evidence(X[:, :0], y, np.zeros(0)))
        - log_odds_against(5, len(s))
        for s in sets
    )
    model = RVMRegressor(noise_precision=1.0, fit_intercept=False).fit(X, y)
    assert model.elbo_[-1] == pytest.approx(best, abs=1e-5)


def test_machine_for_classes_is_at_the_maximum_of_its_bound():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 3)) + 1
    y = rng.random(150) < expit(X @ [2, -1, 1])
    model = RVMClassifier(threshold=0.0, tol=1e-10).fit(X, y)
    assert model.relevance_.all()
    Z, sign = (X - X.mean(axis=0)) / X.std(axis=0), np.where(y, 1.0, -1.0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def bound(parameters):
        """Over mean, covariance, intercept and the centre that it belongs to; α is at its best."""
        mean, triangle, centre, intercept = np.split(parameters, [3, 9, 12])
        factor = np.zeros((3, 3))
        factor[np.tril_indices(3)] = triangle
        covariance = factor @ factor.T
        std = np.linalg.norm((Z - centre) @ factor, axis=1)
        logits = (sign * (Z @ mean + intercept))[:, None] + std[:, None] * nodes
        alpha = 1 / (mean**2 + covariance.diagonal())
        kl = -0.5 * (np.linalg.slogdet(covariance)[1] + np.log(alpha).sum())
        return float((log_expit(logits) @ weights).sum() - kl)

    (posterior,) = model._posteriors
    start = np.concatenate(
        [
            0.8 * posterior.mean,
            1.3 * np.linalg.cholesky(posterior.covariance)[np.tril_indices(3)],
            np.zeros(4),
        ]
    )
    found = optimize.minimize(lambda p: -bound(p), start, options={"gtol": 1e-5})
    assert model.elbo_[-1] == pytest.approx(-found.fun, abs=1e-6)
    np.testing.assert_allclose(posterior.mean, found.x[:3], rtol=1e-3)
    np.testing.assert_allclose(posterior.centre, found.x[9:12], atol=2e-3)
