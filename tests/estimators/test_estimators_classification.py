"""Classification by variational dropout and by evidence, against integrals done in another way."""

import tracemalloc

import numpy as np
import pytest
from scipy import integrate, optimize, sparse, stats
from scipy.special import dawsn, expit, log_expit
from sklearn import datasets
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss

from zeromean.estimators import RVMClassifier, VariationalDropoutClassifier
from zeromean.estimators.likelihoods import log_sigmoid

CLASSIFIERS = [VariationalDropoutClassifier(), RVMClassifier()]
by_name = pytest.mark.parametrize("model", CLASSIFIERS, ids=lambda m: type(m).__name__)


def make_rows(num_rows=300, num_features=20, num_relevant=3, seed=0):
    rng = np.random.default_rng(seed)
    X = 2 * rng.normal(size=(num_rows, num_features)) + rng.normal(size=num_features)
    weights = np.zeros(num_features)
    weights[:num_relevant] = rng.choice([-1, 1], num_relevant)
    logits = (X - X.mean(axis=0)) @ weights + 0.5
    return X, np.where(rng.random(num_rows) < expit(logits), "yes", "no")


def expected_log_sigmoid(mean, std):
    """By adaptive quadrature, the kink of a steep log σ given away."""

    def integrand(y):
        return log_expit(mean + std * y) * np.exp(-0.5 * y**2) / np.sqrt(2 * np.pi)

    around = np.array([-40, 0, 40]) / max(std, 10.0)
    kink = np.clip(-mean / std, -7, 7) if std else 0.0
    return integrate.quad(integrand, -12, 12, points=kink + around, limit=400, epsabs=1e-13)[0]


def kl(mean, std):
    z = np.abs(mean) / (np.sqrt(2) * std)
    return sum(2 * integrate.quad(dawsn, 0, each, epsabs=1e-12)[0] for each in z)


def dropout_bound(Z, sign, mean, std, intercept):
    margins = sign * (Z @ mean + intercept)
    spreads = np.sqrt(Z**2 @ std**2)
    data_term = sum(map(expected_log_sigmoid, margins, spreads))
    return data_term - kl(mean, std)


@pytest.mark.parametrize("std", [0.0, 0.3, 0.9, 1.7, 3.5, 4.5, 7.0, 30.0, 200.0, 1e4])
def test_quadrature_is_exact(std):
    mean = np.linspace(-15, 15, 13)
    result = log_sigmoid.integrate(mean, np.full(13, std**2))
    expected = [expected_log_sigmoid(m, std) for m in mean]
    np.testing.assert_allclose(result.value, expected, rtol=1e-8, atol=1e-9)
    step = 1e-4
    above, below = (
        log_sigmoid.integrate(mean + sign * step, np.full(13, std**2)) for sign in (1, -1)
    )
    np.testing.assert_allclose(result.slope, (above.value - below.value) / (2 * step), atol=1e-7)
    np.testing.assert_allclose(
        result.curvature, (below.slope - above.slope) / (2 * step), atol=1e-7
    )
    if std:
        step = 1e-4 * std**2
        above, below = (
            log_sigmoid.integrate(mean, np.full(13, std**2 + sign * step)) for sign in (1, -1)
        )
        slope = (above.value - below.value) / (2 * step)
        np.testing.assert_allclose(result.spread, -2 * slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("std", [0.3, 0.9, 1.7, 3.5, 4.5, 30.0])
def test_higher_derivatives_are_those_of_the_slope(std):
    mean, variance, step = np.linspace(-9, 9, 7), np.full(7, std**2), 1e-4
    above, below = (log_sigmoid.integrate(mean + sign * step, variance) for sign in (1, -1))
    second, third, fourth = log_sigmoid.higher_derivatives(mean, variance)
    np.testing.assert_allclose(second, (above.slope - below.slope) / (2 * step), atol=1e-8)
    np.testing.assert_allclose(third, (below.curvature - above.curvature) / (2 * step), atol=1e-8)
    above, below = (log_sigmoid.higher_derivatives(mean + s * step, variance) for s in (1, -1))
    np.testing.assert_allclose(fourth, (above[1] - below[1]) / (2 * step), atol=1e-8)


@pytest.mark.parametrize("std", [0.7, 3.0, 6.0, 500.0])
def test_probabilities_are_exact_in_their_tails(std):
    """σ is the distribution of a logistic variable, so that E σ is a normal one, averaged."""
    for mean in (-12 * std, -3 * std, 0.4 * std):
        expected, _ = integrate.quad(
            lambda x, m=mean: stats.logistic.pdf(x) * stats.norm.cdf((m + x) / std),
            -90,
            90,
            points=[-mean if abs(mean) < 90 else 0.0],
            limit=400,
            epsabs=0,
        )
        found = log_sigmoid.average_probability(np.array([mean]), np.array([std**2]))
        if expected > 1e-13 or std > 4:
            np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_probabilities_do_not_pass_one():
    std = np.geomspace(0.01, 1e3, 500)
    assert log_sigmoid.average_probability(1e6 * std, std**2).max() <= 1


def test_chunks_have_draws_of_their_own():
    draw = log_sigmoid.Integral(num_samples=10, seed=0)
    mean, variance = np.zeros(50), np.ones(50)
    first, again, second = (draw(mean, variance, chunk).value for chunk in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(50)


def test_sampling_agrees_with_quadrature():
    rng = np.random.default_rng(0)
    mean, variance = rng.normal(size=2000), rng.uniform(0, 4, size=2000)
    exact = log_sigmoid.integrate(mean, variance)
    sampled = log_sigmoid.sample(mean, variance, num_samples=200, seed=1)
    for name in exact._fields:
        difference = getattr(sampled, name) - getattr(exact, name)
        standard_error = difference.std() / np.sqrt(len(mean))
        assert abs(difference.mean()) < 4 * standard_error, name


def test_sampled_slopes_are_those_of_the_sampled_value():
    mean, variance = np.linspace(-3, 3, 7), np.full(7, 0.8)
    here = log_sigmoid.sample(mean, variance, 20, seed=3)
    step = 1e-5
    above, below = (log_sigmoid.sample(mean, variance + s * step, 20, seed=3) for s in (1, -1))
    np.testing.assert_allclose(
        here.spread, -2 * (above.value - below.value) / (2 * step), rtol=1e-6
    )


def test_bound_is_that_of_the_talk_and_at_its_optimum():
    X, y = make_rows()
    model = VariationalDropoutClassifier(threshold=1e9, tol=1e-9).fit(X, y)
    (posterior,) = model._posteriors
    Z = ((X - X.mean(axis=0)) / X.std(axis=0))[:, posterior.features]
    sign = np.where(y == "yes", 1, -1)

    def bound(parameters):
        mean, log_std, intercept = np.split(parameters, [Z.shape[1], 2 * Z.shape[1]])
        return dropout_bound(Z, sign, mean, np.exp(log_std), intercept[0])

    parameters = np.r_[posterior.mean, np.log(posterior.std), posterior.intercept]
    here = bound(parameters)
    assert model.elbo_[-1] == pytest.approx(here, rel=1e-8)
    slope = optimize.approx_fprime(parameters, bound, 1e-5)
    assert np.abs(slope).max() < 1e-2
    # Weights that are zero want to stay there.
    for feature in np.flatnonzero(model.log_alpha_[0] == np.inf)[:5]:
        column = (X - X.mean(axis=0))[:, [feature]] / X.std(axis=0)[feature]
        for value in (0.01, -0.01):
            tried = dropout_bound(
                np.column_stack([Z, column]),
                sign,
                np.append(posterior.mean, value),
                np.append(posterior.std, np.sqrt(abs(value)) / 3),
                posterior.intercept,
            )
            assert tried < here


def test_rvm_bound_is_gaussian_kl_and_at_its_optimum():
    X, y = make_rows()
    model = RVMClassifier(threshold=2.0, tol=1e-9).fit(X, y)
    (posterior,) = model._posteriors
    size = len(posterior.features)
    assert size >= 3
    Z = ((X - X.mean(axis=0)) / X.std(axis=0))[:, posterior.features]
    sign = np.where(y == "yes", 1, -1)
    alpha = posterior.prior_precision

    def bound(mean, covariance, alpha):
        margins = sign * (Z @ mean + posterior.intercept)
        around = Z - posterior.centre
        spreads = np.sqrt(np.einsum("ij,jk,ik->i", around, covariance, around))
        prior = np.diag(1 / alpha)
        divergence = 0.5 * (
            np.trace(np.linalg.solve(prior, covariance))
            + mean @ np.linalg.solve(prior, mean)
            - size
            + np.linalg.slogdet(prior)[1]
            - np.linalg.slogdet(covariance)[1]
        )
        return sum(map(expected_log_sigmoid, margins, spreads)) - divergence

    here = bound(posterior.mean, posterior.covariance, alpha)
    assert model.elbo_[-1] == pytest.approx(here - 2.0 * size, rel=1e-8)
    np.testing.assert_allclose(
        alpha, 1 / (posterior.mean**2 + posterior.covariance.diagonal()), rtol=1e-3
    )
    rng = np.random.default_rng(0)
    for _ in range(5):
        factor = np.eye(size) + 0.05 * rng.normal(size=(size, size))
        covariance = factor @ posterior.covariance @ factor.T
        mean = posterior.mean * (1 + 0.05 * rng.normal(size=size))
        assert bound(mean, posterior.covariance, alpha) < here
        assert bound(posterior.mean, covariance, alpha) < here
        assert (
            bound(posterior.mean, posterior.covariance, alpha * np.exp(0.2 * rng.normal())) < here
        )


@pytest.mark.filterwarnings("ignore:VariationalDropoutClassifier separates all")
@by_name
@pytest.mark.parametrize("shape", [(300, 20), (80, 80), (30, 100)])
def test_bound_never_falls(model, shape):
    X, y = make_rows(*shape)
    model = clone(model).fit(X, y)
    assert len(model.elbo_) == model.n_iter_[0] + 1 or model.n_iter_[0] == len(model.elbo_)
    assert (np.diff(model.elbo_) >= 0).all()


@by_name
def test_relevant_features_are_found(model):
    X, y = make_rows(num_rows=2000)
    model = clone(model).fit(X, y)
    assert model.relevance_[:3].all()
    np.testing.assert_array_equal(model.relevance_, (model.coef_ != 0)[0])
    if isinstance(model, VariationalDropoutClassifier):
        np.testing.assert_array_equal(model.relevance_, model.log_alpha_[0] < 3)
    else:
        assert model.relevance_.sum() <= 4
        np.testing.assert_array_equal(model.relevance_, np.isfinite(model.log_alpha_[0]))


@by_name
def test_sampling_finds_the_same_features(model):
    X, y = make_rows()
    quadrature = clone(model).fit(X, y)
    sampled = clone(model).set_params(integration="sampling", n_draws=200, random_state=0)
    sampled.fit(X, y)
    assert (sampled.relevance_ == quadrature.relevance_).mean() > 0.85
    np.testing.assert_allclose(sampled.predict_proba(X), quadrature.predict_proba(X), atol=0.05)
    again = clone(sampled).fit(X, y)
    np.testing.assert_array_equal(again.coef_, sampled.coef_)


@by_name
def test_units_do_not_matter(model):
    X, y = make_rows()
    factors = np.ones(20)
    factors[[0, 5, 19]] = 1e6, 1e-6, 1e8
    before, after = clone(model).fit(X, y), clone(model).fit(X * factors, y)
    np.testing.assert_array_equal(after.relevance_, before.relevance_)
    np.testing.assert_allclose(after.coef_ * factors, before.coef_, rtol=1e-5)


@by_name
def test_sparse_input_gives_the_same(model):
    X, y = make_rows()
    X[np.abs(X) < 1] = 0
    dense, other = clone(model).fit(X, y), clone(model).fit(sparse.csr_array(X), y)
    np.testing.assert_allclose(other.coef_, dense.coef_, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(
        other.predict_proba(sparse.csc_matrix(X)), dense.predict_proba(X), rtol=1e-6
    )


@by_name
def test_probabilities_are_averages_over_weights(model):
    X, y = make_rows(num_rows=60)
    model = clone(model).fit(X, y)
    (posterior,) = model._posteriors
    covariance = getattr(posterior, "covariance", None)
    if covariance is None:
        covariance = np.diag(posterior.std**2)
    weights = np.random.default_rng(0).multivariate_normal(posterior.mean, covariance, size=100_000)
    Z = ((X - X.mean(axis=0)) / X.std(axis=0))[:, posterior.features]
    # The intercept follows the weights of the machine.
    moves = (weights - posterior.mean) @ getattr(posterior, "centre", np.zeros(Z.shape[1]))
    samples = expit(weights @ Z.T + posterior.intercept - moves[:, None])
    error = samples.std(axis=0) / np.sqrt(len(samples))
    probability = model.predict_proba(X)[:, 1]
    assert (np.abs(samples.mean(axis=0) - probability) < 5 * error + 1e-12).all()
    log_odds = np.log(probability) - np.log(model.predict_proba(X)[:, 0])
    np.testing.assert_allclose(model.decision_function(X), log_odds, rtol=1e-6)
    np.testing.assert_array_equal(model.predict(X), np.where(log_odds > 0, "yes", "no"))


@by_name
def test_several_classes_are_one_against_the_rest(model):
    X, y = datasets.load_iris(return_X_y=True)
    model = clone(model).fit(X, y)
    assert model.coef_.shape == model.log_alpha_.shape == (3, 4)
    assert model.relevance_.shape == (4,)
    assert len(model.elbo_) == 3
    assert model.score(X, y) > 0.9
    for row, label in enumerate(model.classes_):
        one = clone(model).fit(X, y == label)
        np.testing.assert_allclose(model.coef_[row], one.coef_[0], rtol=1e-6)
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert log_loss(y, probabilities) < 0.4


@by_name
def test_separable_rows_are_no_trouble(model):
    X = np.linspace(-1, 1, 40)[:, None] * [1, 0.5]
    y = X[:, 0] > 0
    model = clone(model).fit(X, y)
    assert model.score(X, y) == 1
    assert np.isfinite(model.predict_proba(X)).all()


@by_name
def test_bad_input_is_refused(model):
    X, y = make_rows()
    with pytest.raises(ValueError, match="needs at least two classes, got one class: yes"):
        clone(model).fit(X, np.full(300, "yes"))
    broken = X.copy()
    broken[0, 0] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        clone(model).fit(broken, y)
    with pytest.raises(ValueError, match="'integration' parameter"):
        clone(model).set_params(integration="guess").fit(X, y)
    with pytest.raises(ValueError, match="Unknown label type"):
        clone(model).fit(X, np.linspace(0, 1, 300))
    with pytest.warns(ConvergenceWarning, match="did not converge in max_iter=1 "):
        clone(model).set_params(max_iter=1).fit(X, y)


@by_name
def test_constant_and_duplicate_columns_are_harmless(model):
    X, y = make_rows()
    constant = clone(model).fit(np.column_stack([X, np.full(300, 1e8), np.zeros(300)]), y)
    assert not constant.relevance_[-2:].any()
    twice = clone(model).fit(np.column_stack([X, X]), y)
    assert (twice.relevance_[:3] | twice.relevance_[20:23]).all()


def test_probabilities_of_both_classes_keep_their_digits():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    model = RVMClassifier().fit(X, X[:, 0] > 0)
    probabilities = model.predict_proba(np.vstack([200 * X, -200 * X]))
    assert (probabilities > 0).all()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)


def test_rows_that_are_beyond_doubt_can_be_fitted():
    X = np.zeros((40, 2))
    X[:5, 0] = X[2:8, 1] = 1
    assert RVMClassifier().fit(X, X[:, 0] > 0).score(X, X[:, 0] > 0) == 1
    rng = np.random.default_rng(11)
    X = rng.normal(size=(6, 2))
    weight = np.where(rng.random(6) < 0.5, 1.0, 1e4)
    model = VariationalDropoutClassifier().fit(X, X[:, 0] > 0, sample_weight=weight)
    assert model.score(X, X[:, 0] > 0) == 1
    X = np.zeros((1000, 1))
    X[:3] = 1
    assert RVMClassifier().fit(X, X[:, 0] > 0).score(X, X[:, 0] > 0) == 1


def test_one_small_gain_is_not_the_end():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(4000, 4))
    X[:4, 0] += 5
    model = RVMClassifier().fit(X, np.arange(4000) < 4)
    assert model.elbo_[-1] > -3.05


def test_saddles_are_left():
    """Rare binary features: of those that stand together, many optima share the weight."""
    rng = np.random.default_rng(2)
    X = 1.0 * (rng.random((500, 2000)) < 0.005)
    w = np.zeros(2000)
    w[:30] = rng.choice([-2, 2], 30)
    y = X @ w > 0.3 * rng.logistic(size=500)
    model = VariationalDropoutClassifier().fit(X, y)  # A ConvergenceWarning would be an error.
    assert np.max(model.n_iter_) < 150


@pytest.mark.parametrize("Classifier", [RVMClassifier, VariationalDropoutClassifier])
def test_log_probabilities(Classifier):
    X, y = datasets.load_iris(return_X_y=True)
    model = Classifier().fit(X, y)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X))


def test_memory_of_sampling_does_not_grow_with_rows():
    mean, variance = np.linspace(-3, 3, 50_000), np.full(50_000, 2.0)
    tracemalloc.start()
    whole = log_sigmoid.sample(mean, variance, 100, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    # The draws of the first rows are the same, however many follow.
    np.testing.assert_array_equal(
        whole.value[:10], log_sigmoid.sample(mean[:10], variance[:10], 100, 0).value
    )


@pytest.mark.parametrize("seed", range(3))
def test_chance_that_separates_few_rows_is_warned_of(seed):
    rng = np.random.default_rng(seed)
    X, new = rng.normal(size=(60, 100)), rng.normal(size=(1000, 100))
    y, labels = (2 * Z[:, :3].sum(axis=1) > rng.logistic(size=len(Z)) for Z in (X, new))
    with pytest.warns(UserWarning, match="separates all 60 rows by some of 100 features"):
        model = VariationalDropoutClassifier().fit(X, y)
    # The bound prefers it to the relevant features, which predict better.
    alone = VariationalDropoutClassifier().fit(X[:, :3], y)
    assert model.elbo_[-1] > alone.elbo_[-1]
    loss = [
        -np.log(m.predict_proba(Z)[np.arange(1000), labels.astype(int)]).mean()
        for m, Z in ((model, new), (alone, new[:, :3]))
    ]
    assert loss[0] > loss[1]
    RVMClassifier().fit(X, y)  # No warning.
