"""The optimum that is found, against all subsets of features and against general optimisers."""

import itertools
import warnings

import numpy as np
import pytest
from scipy import linalg, optimize, sparse, stats
from scipy.special import expit, log_expit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import ARDRegression
from sklearn.pipeline import make_pipeline

from zeromean.estimators import (
    RBFBasis,
    RVMClassifier,
    RVMRegressor,
    VariationalDropoutClassifier,
    VariationalDropoutRegressor,
)
from zeromean.estimators.likelihoods.quadratic import RowsQuadratic

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
    """log N(y | 0, I + X α⁻¹ Xᵀ) and its gradient in log α."""
    variance = np.exp(-log_alpha)
    factor = linalg.cho_factor(np.eye(len(y)) + X * variance @ X.T, lower=True)
    whitened = linalg.cho_solve(factor, np.column_stack([y, X]))
    value = -0.5 * (y @ whitened[:, 0] + len(y) * np.log(2 * np.pi))
    value -= np.log(factor[0].diagonal()).sum()
    gain = (X.T @ whitened[:, 0]) ** 2 - np.einsum("nf,nf->f", X, whitened[:, 1:])
    return value, -0.5 * variance * gain


def best_log_evidence(X, y):
    """Maximised over the prior precisions of all features, by a general optimiser.

    Within bounds: unbounded, a line search tries precisions so small that the covariance is
    singular to working precision, on some machines. What is best without a feature, at an infinite
    precision, is the best of a smaller set.
    """
    bounds = [(-8.0, 8.0)] * X.shape[1]
    fits = [
        optimize.minimize(
            lambda r: tuple(-part for part in log_evidence(X, y, r)),
            np.full(X.shape[1], start),
            jac=True,
            bounds=bounds,
            options={"ftol": 1e-14, "gtol": 1e-7},
        )
        for start in (-2.0, 2.0)
    ]
    return -min(fit.fun for fit in fits)


def test_gradient_of_the_reference_is_its_derivative():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(20, 3)), rng.normal(size=20)
    expected = stats.multivariate_normal(np.zeros(20), np.eye(20) + X @ X.T).logpdf(y)
    assert log_evidence(X, y, np.zeros(3))[0] == pytest.approx(expected)
    point = np.array([-1.0, 0.0, 2.0])
    slopes = optimize.approx_fprime(point, lambda r: log_evidence(X, y, r)[0], 1e-6)
    np.testing.assert_allclose(log_evidence(X, y, point)[1], slopes, rtol=1e-4)


def log_odds_against(num_features, size):
    """Of a set of so many features, if all sizes are equally likely, up to a constant."""
    return sum(max(np.log((num_features - n) / (n + 1)), 0) for n in range(size))


def best_of_all_sets(X, y):
    num_features = X.shape[1]
    sizes = range(num_features + 1)
    sets = [s for n in sizes for s in itertools.combinations(range(num_features), n)]
    return max(
        (best_log_evidence(X[:, list(s)], y) if s else log_evidence(X[:, :0], y, np.zeros(0))[0])
        - log_odds_against(num_features, len(s))
        for s in sets
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_machine_finds_the_best_of_all_sets_of_features(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(40, 5)) + 3 * rng.normal(size=(40, 1))
    y = X @ rng.choice([-1, 0, 1], 5) + rng.normal(size=40)
    X, y = X - X.mean(axis=0), y - y.mean()
    model = RVMRegressor(noise_precision=1.0, fit_intercept=False).fit(X, y)
    assert model.elbo_[-1] == pytest.approx(best_of_all_sets(X, y), abs=1e-5)


# Where features are worth their price only together, or only five of six.
@pytest.mark.parametrize("seed", [3014, 3021, 3025, 3027])
def test_machine_finds_the_best_set_where_rows_are_few(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(12, 6)) + rng.choice([0, 1, 3]) * rng.normal(size=(12, 1))
    y = X @ rng.choice([-1, 0, 1], 6) + rng.normal(size=12)
    model = RVMRegressor(noise_precision=1.0, fit_intercept=False).fit(X, y)
    assert model.elbo_[-1] == pytest.approx(best_of_all_sets(X, y), abs=1e-3)


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


def wave(x):
    return np.sin(3 * x[:, 0]) * np.exp(x[:, 1])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("Regressor", [RVMRegressor, VariationalDropoutRegressor])
def test_redundant_basis_functions_do_not_end_in_an_empty_model(Regressor, seed):
    rng = np.random.default_rng(seed)
    x, new = rng.uniform(size=(300, 2)), rng.uniform(size=(1000, 2))
    machine = make_pipeline(RBFBasis(gamma=1.0), Regressor())
    machine.fit(x, wave(x) + 0.01 * rng.normal(size=300))
    # The standard deviation of the function is 0.6, that of the noise 0.01.
    assert np.sqrt(np.mean((machine.predict(new) - wave(new)) ** 2)) < 0.02


def test_redundant_basis_functions_for_classes():
    rng = np.random.default_rng(2)

    def rows(number):
        x = rng.normal(size=(number, 2))
        return x, 4 * np.sin(2 * x[:, 0]) + 3 * x[:, 1] > rng.logistic(size=number)

    (x, y), (new, labels) = rows(200), rows(2000)
    basis = RBFBasis(gamma=0.3).fit(x)
    scores = {
        threshold: RVMClassifier(threshold=threshold)
        .fit(basis.transform(x), y)
        .score(basis.transform(new), labels)
        for threshold in ("auto", 0)
    }
    assert scores["auto"] > scores[0] - 0.02


@pytest.mark.parametrize("seed", range(5))
def test_few_rows_of_many_features_are_not_interpolated(seed):
    """Models of hardly fewer features than rows reach more evidence, with hardly any noise."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(100, 1000))
    y = X[:, :5] @ np.array([1.0, -1, 1, -1, 2]) + 0.3 * rng.normal(size=100)
    model = RVMRegressor().fit(X, y)
    assert model.relevance_[:5].all()
    assert model.relevance_.sum() < 12
    assert 0.2 < model.noise_precision_**-0.5 < 0.4


@pytest.mark.parametrize("noise", [0.1, 1e-2, 1e-3])
@pytest.mark.parametrize("seed", range(3))
def test_evidence_of_nearly_collinear_features_is_what_it_is_said_to_be(seed, noise):
    x = np.linspace(0, 1, 100)[:, None]
    X = x ** np.arange(1, 11)
    y = np.sin(6 * x[:, 0]) + noise * np.random.default_rng(seed).normal(size=100)
    X, y = X - X.mean(axis=0), y - y.mean()
    model = RVMRegressor(threshold=0, fit_intercept=False).fit(X, y)
    # log N(y | 0, F Fᵀ + noise) by the singular values of F.
    factor = X[:, model.relevance_] / np.exp(0.5 * model.log_alpha_[model.relevance_])
    left, singular, _ = np.linalg.svd(factor, full_matrices=False)
    inside = left.T @ y
    variances = np.append(singular**2, np.zeros(100 - len(singular))) + 1 / model.noise_precision_
    square = (inside**2 / variances[: len(inside)]).sum()
    square += model.noise_precision_ * np.sum((y - left @ inside) ** 2)
    evidence = -0.5 * (square + np.log(2 * np.pi * variances).sum())
    # Learned noise has a floor: misfits count 1e-8 squares of the target more.
    floor = 0.5 * model.noise_precision_ * 1e-8 * (y @ y)
    assert model.elbo_[-1] == pytest.approx(evidence - floor, abs=0.01)
    rival = ARDRegression(fit_intercept=False).fit(X, y)
    error = [np.std(m.predict(X) - np.sin(6 * x[:, 0])) for m in (model, rival)]
    assert error[0] < 1.5 * error[1] + 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_collinear_features_with_hardly_any_noise_can_be_fitted(seed):
    x = np.linspace(0, 1, 50)[:, None]
    X = x ** np.arange(1, 16)
    y = np.sin(6 * x[:, 0]) + 1e-5 * np.random.default_rng(seed).normal(size=50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = VariationalDropoutRegressor().fit(X, y)
    assert np.std(model.predict(X) - np.sin(6 * x[:, 0])) < 1e-3


def test_an_unfinished_search_for_the_noise_is_reported():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 50))
    y = X[:, :20].sum(axis=1) + rng.normal(size=200)
    with pytest.warns(ConvergenceWarning):
        VariationalDropoutRegressor(max_iter=1).fit(X, y)


def test_blocks_of_sparse_rows_equal_those_of_dense_ones():
    rng = np.random.default_rng(0)
    X = sparse.random_array((30, 50), density=0.2, rng=rng, format="csc")
    weight, mean, scale = rng.random(30), rng.normal(size=50), 1 + rng.random(50)
    thin = RowsQuadratic(X, weight, mean, scale, np.zeros(50))
    full = RowsQuadratic(X.toarray(), weight, mean, scale, np.zeros(50))
    for rows, columns in (([3, 1], range(50)), (range(50), [7]), ([], range(50)), ([2], [])):
        some, others = np.array(rows, dtype=np.intp), np.array(columns, dtype=np.intp)
        np.testing.assert_allclose(
            thin.block(some, others), full.block(some, others), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rows", "features", "relevant"), [(200, 400, 60), (100, 1000, 15)])
def test_many_relevant_features_of_wide_data_are_found(rows, features, relevant, seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features))
    weights = np.zeros(features)
    weights[:relevant] = rng.choice([-1, 1], relevant) * rng.uniform(0.5, 1.5, relevant)
    model = RVMRegressor().fit(X, X @ weights + 0.3 * rng.normal(size=rows))
    assert model.relevance_[:relevant].all()
    # Few enough others that new rows are predicted as well as the noise allows.
    new = rng.normal(size=(1000, features))
    assert model.score(new, new @ weights) > 0.99


@pytest.mark.parametrize("Regressor", [RVMRegressor, VariationalDropoutRegressor])
def test_a_difference_is_found_with_hardly_more_rows_than_features(Regressor):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(300, 240))
    X[:, 1] = X[:, 0] + 0.05 * X[:, 1]
    model = Regressor().fit(X, 60 * (X[:, 0] - X[:, 1]) + rng.normal(size=300))
    assert model.relevance_[:2].all()


@pytest.mark.parametrize(("rows", "features"), [(1, 5), (2, 20), (3, 200), (4, 200)])
def test_a_handful_of_rows_of_noise_explains_nothing(rows, features):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        model = RVMRegressor().fit(rng.normal(size=(rows, features)), rng.normal(size=rows))
        assert not model.relevance_.any()


@pytest.mark.parametrize("threshold", [0, 0.001, "auto"])
def test_of_a_feature_and_its_copy_one_is_kept(threshold):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 6))
    y = X[:, 0] - X[:, 1] + rng.normal(size=100)
    alone = RVMRegressor(threshold=threshold).fit(X, y)
    model = RVMRegressor(threshold=threshold).fit(np.hstack([X, X[:, :2]]), y)
    assert model.relevance_[[0, 6]].sum() == model.relevance_[[1, 7]].sum() == 1
    if threshold != "auto":  # Its prices know how many features there are.
        assert model.elbo_[-1] == pytest.approx(alone.elbo_[-1])


def test_a_class_whose_rows_have_no_weight_is_absent():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 3))
    y = np.digitize(X[:, 0], [-0.5, 0.5])
    weight = np.where(y == 2, 0.0, 1.0)
    model = RVMClassifier().fit(X, y, sample_weight=weight)
    alone = RVMClassifier().fit(X[y < 2], y[y < 2])
    np.testing.assert_array_equal(model.classes_, [0, 1])
    np.testing.assert_allclose(model.predict_proba(X), alone.predict_proba(X), rtol=1e-6)
    with pytest.raises(ValueError, match="at least two classes"):
        RVMClassifier().fit(X, y, sample_weight=np.where(y == 0, 1.0, 0.0))
