"""Regression by variational dropout and by evidence, against formulas written down anew."""

import warnings

import joblib
import numpy as np
import pandas as pd
import pytest
from scipy import integrate, optimize, sparse, stats
from scipy.special import dawsn
from sklearn import datasets
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from zeromean.estimators import RBFBasis, RVMClassifier, RVMRegressor, VariationalDropoutRegressor
from zeromean.estimators.dropout.penalty import dropout_penalty
from zeromean.estimators.evidence.feature_prior import LearnedPrice

REGRESSORS = [VariationalDropoutRegressor(), RVMRegressor()]
by_name = pytest.mark.parametrize("model", REGRESSORS, ids=lambda m: type(m).__name__)


def make_rows(num_rows=200, num_features=30, num_relevant=4, noise=0.5, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows, num_features)) @ np.diag(rng.uniform(0.5, 2, num_features))
    X += rng.normal(size=num_features)
    weights = np.zeros(num_features)
    weights[:num_relevant] = rng.choice([-1, 1], num_relevant) * rng.uniform(0.5, 1.5, num_relevant)
    return X, X @ weights + 3 + noise * rng.normal(size=num_rows)


def kl(alpha):
    """2 ∫₀ᶻ D by adaptive quadrature."""
    return 2 * integrate.quad(dawsn, 0, 1 / np.sqrt(2 * alpha), epsabs=1e-12)[0]


def talk_objective(X, t, w, alpha, beta):
    """The lower bound as the talk has it, for the weights that are not zero."""
    spread = np.trace(X.T @ X @ np.diag(alpha * w**2))
    fit = np.sum((X @ w - t) ** 2) + spread
    kls = sum(kl(a) for a in alpha)
    return len(t) / 2 * np.log(beta / (2 * np.pi)) - beta / 2 * fit - kls


def coordinate_ascent(X, t, beta, iterations):
    """The talk's algorithm, sign corrected, α by a bracketing search for each weight."""
    square = np.sum(X**2, axis=0)
    alpha = np.full(X.shape[1], 0.1)
    for _ in range(iterations):
        w = np.linalg.solve(X.T @ X + np.diag(alpha * square), X.T @ t)
        for d in range(len(w)):
            cost = beta / 2 * w[d] ** 2 * square[d]
            found = optimize.minimize_scalar(
                lambda r, c=cost: c * np.exp(r) + kl(np.exp(r)), bounds=(-15, 25), method="bounded"
            )
            alpha[d] = np.exp(found.x)
    return w, alpha


@pytest.mark.parametrize("v", [1e-12, 1e-3, 0.05, 0.7, 1.5, 3.0, 40.0, 1e4])
def test_penalty_is_the_smallest_cost_over_alpha(v):
    guesses = -np.log(v), -2 * np.log(v)
    found = optimize.minimize_scalar(
        lambda r: 0.5 * np.exp(r) * v**2 + kl(np.exp(r)),
        bounds=(min(guesses) - 3, max(guesses) + 3),
        method="bounded",
        options={"xatol": 1e-10},
    )
    penalty = dropout_penalty(np.array([v, -v]))
    np.testing.assert_allclose(penalty.value, found.fun, rtol=1e-8)
    np.testing.assert_allclose(np.log(penalty.alpha), found.x, atol=1e-4)


def test_penalty_derivatives_are_those_of_its_value():
    v = np.geomspace(1e-3, 1e6, 200)
    step = 1e-4 * v
    above, below, here = (dropout_penalty(u) for u in (v + step, v - step, v))
    np.testing.assert_allclose(here.slope, (above.value - below.value) / (2 * step), rtol=1e-6)
    # Its curvature passes through no zero, but becomes small beside its slope.
    np.testing.assert_allclose(
        here.curvature, (above.slope - below.slope) / (2 * step), rtol=1e-5, atol=1e-9
    )
    assert here.curvature.min() > -0.222
    at_zero = dropout_penalty(np.zeros(1))
    assert (at_zero.value, at_zero.slope, at_zero.alpha) == (0, 1, np.inf)


def test_penalty_is_finite_at_extreme_sizes():
    penalty = dropout_penalty(np.array([1e-300, 1e-29, 1e100]))
    assert np.isfinite(penalty.value).all()
    assert np.isfinite(penalty.slope).all()


@pytest.mark.parametrize("noise_precision", [4.0, "elbo", "evidence"])
def test_bound_is_that_of_the_talk(noise_precision):
    X, y = make_rows()
    model = VariationalDropoutRegressor(noise_precision=noise_precision, threshold=1e9).fit(X, y)
    live = model.relevance_
    centred, target = X - X.mean(axis=0), y - y.mean()
    bound = talk_objective(
        centred[:, live],
        target,
        model.coef_[live],
        np.exp(model.log_alpha_[live]),
        model.noise_precision_,
    )
    # Learned noise has a floor, which costs this much.
    assert model.elbo_[-1] == pytest.approx(bound, rel=1e-6 if noise_precision == "elbo" else 1e-9)


def test_weights_satisfy_the_exact_update_with_a_plus():
    X, y = make_rows()
    model = VariationalDropoutRegressor(threshold=1e9).fit(X, y)
    live = model.relevance_
    assert 4 <= live.sum() < 30
    centred = (X - X.mean(axis=0))[:, live]
    alpha = np.exp(model.log_alpha_[live])
    system = centred.T @ centred + np.diag(alpha * np.sum(centred**2, axis=0))
    np.testing.assert_allclose(
        model.coef_[live], np.linalg.solve(system, centred.T @ (y - y.mean())), rtol=1e-6
    )


def test_optimum_is_that_of_the_coordinate_ascent():
    X, y = make_rows(num_rows=60, num_features=6, num_relevant=3)
    X, y = X - X.mean(axis=0), y - y.mean()
    w, alpha = coordinate_ascent(X, y, beta=4.0, iterations=150)
    model = VariationalDropoutRegressor(noise_precision=4.0, fit_intercept=False).fit(X, y)
    assert model.elbo_[-1] >= talk_objective(X, y, w, alpha, 4.0) - 1e-9
    relevant = alpha < np.exp(3)
    np.testing.assert_array_equal(model.relevance_, relevant)
    np.testing.assert_allclose(model.coef_[relevant], w[relevant], rtol=1e-4, atol=2e-5)


def test_learned_noise_is_an_optimum_of_the_bound():
    X, y = make_rows()
    learned = VariationalDropoutRegressor(noise_precision="elbo").fit(X, y)
    best = learned.elbo_[-1]
    for factor in (0.97, 1.03):
        given = VariationalDropoutRegressor(noise_precision=factor * learned.noise_precision_)
        assert given.fit(X, y).elbo_[-1] < best


@pytest.mark.parametrize("shape", [(200, 30), (100, 100), (40, 120)])
@pytest.mark.parametrize("noise_precision", [4.0, "elbo", "evidence"])
def test_bound_never_falls(shape, noise_precision):
    X, y = make_rows(*shape)
    model = VariationalDropoutRegressor(noise_precision=noise_precision)
    with warnings.catch_warnings():
        # With more features than rows, the bound over the noise precision has no maximum.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(X, y)
    assert len(model.elbo_) > 2
    assert (np.diff(model.elbo_) >= 0).all()


@pytest.mark.parametrize("shape", [(200, 30), (100, 100), (40, 120)])
@pytest.mark.parametrize("threshold", ["auto", 0.0, 2.0])
def test_evidence_never_falls(shape, threshold):
    X, y = make_rows(*shape)
    model = RVMRegressor(threshold=threshold, noise_precision=4.0).fit(X, y)
    assert (np.diff(model.elbo_) >= 0).all()


def log_evidence(X, y, alpha, beta):
    covariance = np.eye(len(y)) / beta + X / alpha @ X.T
    return stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y)


def best_log_evidence(X, y, beta):
    """Maximised over the prior precisions by a general optimiser, from several starts."""
    starts = [np.full(X.shape[1], start) for start in (-2.0, 2.0)]
    return max(
        -optimize.minimize(lambda r: -log_evidence(X, y, np.exp(r), beta), start).fun
        for start in starts
    )


def test_rvm_maximises_the_evidence():
    X, y = make_rows(num_rows=60, num_features=4, num_relevant=4)
    X, y = X - X.mean(axis=0), y - y.mean()
    model = RVMRegressor(threshold=0.0, noise_precision=4.0, fit_intercept=False).fit(X, y)
    assert model.relevance_.all()
    alpha = np.exp(model.log_alpha_)
    assert model.elbo_[-1] == pytest.approx(log_evidence(X, y, alpha, 4.0), abs=1e-8)
    assert model.elbo_[-1] == pytest.approx(best_log_evidence(X, y, 4.0), abs=1e-6)
    precision = 4.0 * X.T @ X + np.diag(alpha)
    np.testing.assert_allclose(model.covariance_, np.linalg.inv(precision), rtol=1e-6)
    np.testing.assert_allclose(model.coef_, 4.0 * model.covariance_ @ X.T @ y, rtol=1e-6)


@pytest.mark.parametrize("threshold", [0.5, 3.0])
def test_relevant_is_what_adds_more_evidence_than_the_threshold(threshold):
    X, y = make_rows(num_rows=60, num_features=6, num_relevant=2)
    X, y = X - X.mean(axis=0), y - y.mean()
    model = RVMRegressor(threshold=threshold, noise_precision=4.0, fit_intercept=False).fit(X, y)
    kept = np.flatnonzero(model.relevance_)
    alpha = np.exp(model.log_alpha_)
    evidence = log_evidence(X[:, kept], y, alpha[kept], 4.0)
    for feature in range(6):
        if feature in kept:
            without = np.setdiff1d(kept, feature)
            lost = evidence - log_evidence(X[:, without], y, alpha[without], 4.0)
            assert lost > threshold
        else:
            gained = (
                max(
                    log_evidence(X[:, [*kept, feature]], y, np.append(alpha[kept], a), 4.0)
                    for a in np.geomspace(1e-3, 1e6, 60)
                )
                - evidence
            )
            assert gained < threshold


def test_learned_price_is_a_uniform_prior_over_sizes():
    prices = LearnedPrice(7)
    assert prices.of_one_more(0) == pytest.approx(np.log(7))
    assert prices.of_one_more(2) == pytest.approx(np.log(5 / 3))
    assert prices.of_one_more(5) == 0
    assert prices.total(3) == pytest.approx(np.log(7 * 6 * 5 / 6))
    assert prices.total(7) == pytest.approx(sum(prices.of_one_more(n) for n in range(7)))


def test_relevance_of_dropout_is_log_alpha_below_the_threshold():
    X, y = make_rows(num_rows=100, num_features=60)
    for threshold in (0.0, 3.0):
        model = VariationalDropoutRegressor(threshold=threshold).fit(X, y)
        np.testing.assert_array_equal(model.relevance_, model.log_alpha_ < threshold)
        np.testing.assert_array_equal(model.relevance_, model.coef_ != 0)
    assert model.relevance_[:4].all()


@by_name
def test_units_do_not_matter(model):
    X, y = make_rows()
    before = clone(model).fit(X, y)
    factors = np.ones(30)
    factors[[0, 2, 20]] = 1e6, 1e-6, 1e8
    after = clone(model).fit(X * factors, y)
    np.testing.assert_array_equal(after.relevance_, before.relevance_)
    np.testing.assert_allclose(after.coef_ * factors, before.coef_, rtol=1e-6)
    np.testing.assert_allclose(after.predict(X * factors), before.predict(X), rtol=1e-8)
    scaled = clone(model).fit(X, 1e8 * y + 1e9)
    np.testing.assert_allclose(scaled.coef_, 1e8 * before.coef_, rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(scaled.relevance_, before.relevance_)


@by_name
def test_large_offsets_cost_no_digits(model):
    X, y = make_rows()
    before, after = clone(model).fit(X, y), clone(model).fit(X + 1e7, y)
    np.testing.assert_allclose(after.coef_, before.coef_, rtol=1e-5, atol=1e-8)


@by_name
def test_sparse_input_gives_the_same(model):
    X, y = make_rows()
    X[np.abs(X) < 1] = 0
    dense = clone(model).fit(X, y)
    for form in (sparse.csr_array, sparse.csc_matrix):
        other = clone(model).fit(form(X), y)
        np.testing.assert_allclose(other.coef_, dense.coef_, rtol=1e-6, atol=1e-10)
        mean, std = other.predict(form(X), return_std=True)
        np.testing.assert_allclose(mean, dense.predict(X), rtol=1e-8)
        np.testing.assert_allclose(std, dense.predict(X, return_std=True)[1], rtol=1e-6)
    wide = X[:20]
    np.testing.assert_allclose(
        clone(model).fit(sparse.csr_array(wide), y[:20]).coef_,
        clone(model).fit(wide, y[:20]).coef_,
        rtol=1e-5,
        atol=1e-8,
    )


@by_name
def test_few_rows_and_many_rows_take_two_ways_to_one_answer(model, monkeypatch):
    X, y = make_rows(num_rows=50, num_features=40)
    by_moments = clone(model).fit(X, y)
    monkeypatch.setattr("zeromean.estimators.sparse_regressor.MOST_CORRELATED", 0)
    by_rows = clone(model).fit(X, y)
    np.testing.assert_allclose(by_rows.coef_, by_moments.coef_, rtol=1e-6, atol=1e-10)
    assert by_rows.elbo_[-1] == pytest.approx(by_moments.elbo_[-1], rel=1e-9)


@by_name
def test_predicted_std_is_that_of_sampled_weights(model):
    X, y = make_rows(num_rows=40, num_features=10)
    model = clone(model).set_params(noise_precision=3.0).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, model.predict(X))
    rng = np.random.default_rng(0)
    kept = model.relevance_
    weights = rng.multivariate_normal(model.coef_[kept], model.covariance_, size=100_000)
    noise = rng.normal(size=(100_000, 40)) / np.sqrt(model.noise_precision_)
    level = rng.normal(size=(100_000, 1)) / np.sqrt(40 * model.noise_precision_)
    samples = weights @ (X - X.mean(axis=0))[:, kept].T + level + noise
    np.testing.assert_allclose(std, samples.std(axis=0), rtol=5 / np.sqrt(2 * 100_000))


@by_name
def test_all_features_relevant_is_least_squares(model):
    X, y = make_rows(num_rows=5000, num_features=5, num_relevant=5, noise=0.01)
    plain = LinearRegression().fit(X, y)
    model = clone(model).fit(X, y)
    np.testing.assert_allclose(model.coef_, plain.coef_, rtol=1e-4)
    assert model.noise_precision_ == pytest.approx(1e4, rel=0.1)
    assert model.score(X, y) > 0.9999


def test_many_irrelevant_features_are_found():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 2000))
    y = X[:, :10] @ rng.choice([-1, 1], 10) + np.sqrt(0.1) * rng.normal(size=100)
    model = RVMRegressor().fit(X, y)
    assert model.relevance_[:10].all()
    assert model.relevance_.sum() <= 15


@by_name
def test_works_with_the_rest_of_scikit_learn(model, tmp_path):
    X, y = make_rows()
    frame = pd.DataFrame(X, columns=[f"feature {n}" for n in range(30)])
    pipeline = make_pipeline(StandardScaler().set_output(transform="pandas"), clone(model))
    search = GridSearchCV(pipeline, {f"{type(model).__name__.lower()}__threshold": [1.0, 3.0]})
    search.fit(frame, y)
    best = search.best_estimator_[-1]
    np.testing.assert_array_equal(best.feature_names_in_, frame.columns)
    joblib.dump(best, tmp_path / "model")
    scaled = search.best_estimator_[0].transform(frame)
    np.testing.assert_array_equal(
        joblib.load(tmp_path / "model").predict(scaled), search.predict(frame)
    )
    with pytest.raises(ValueError, match="feature names"):
        best.predict(scaled[scaled.columns[::-1]])


@by_name
def test_constant_and_duplicate_columns_are_harmless(model):
    X, y = make_rows()
    plain = clone(model).fit(X, y)
    constant = clone(model).fit(np.column_stack([X, np.full(200, 1e8), np.zeros(200)]), y)
    assert not constant.relevance_[-2:].any()
    assert (constant.log_alpha_[-2:] == np.inf).all()
    twice = clone(model).fit(np.column_stack([X, X]), y)
    both = twice.coef_[:30] + twice.coef_[30:]
    np.testing.assert_array_equal(both[:4] != 0, plain.coef_[:4] != 0)
    assert not (twice.relevance_[:4] & twice.relevance_[30:34]).any()


@by_name
@pytest.mark.parametrize("value", [0.0, -7.5, 1e12])
def test_constant_target_makes_nothing_relevant(model, value):
    X, _ = make_rows()
    model = clone(model).fit(X, np.full(200, value))
    assert not model.relevance_.any()
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, value)
    assert (std == 0).all()


@by_name
def test_exactly_linear_target_is_found(model):
    X, _ = make_rows()
    y = 2 * X[:, 3] - 5 * X[:, 8] + 1
    model = clone(model).fit(X, y)
    np.testing.assert_allclose(model.coef_[[3, 8]], [2, -5], rtol=1e-4)
    np.testing.assert_allclose(model.predict(X), y, atol=1e-2)


@by_name
def test_bad_input_is_refused(model):
    X, y = make_rows()
    broken = X.copy()
    broken[3, 4] = np.nan
    with pytest.raises(ValueError, match="contains NaN"):
        clone(model).fit(broken, y)
    with pytest.raises(ValueError, match="Negative values in data passed to `sample_weight`"):
        clone(model).fit(X, y, sample_weight=-np.ones(200))
    with pytest.raises(ValueError, match="zero"):
        clone(model).fit(X, y, sample_weight=np.zeros(200))
    with pytest.raises(ValueError, match="'max_iter' parameter"):
        clone(model).set_params(max_iter=0).fit(X, y)
    with pytest.raises(ValueError, match="'noise_precision' parameter"):
        clone(model).set_params(noise_precision=-1.0).fit(X, y)
    with pytest.warns(ConvergenceWarning, match="did not converge in max_iter=1 "):
        clone(model).set_params(max_iter=1).fit(X, y)


def test_kernel_machine_finds_sinc_with_few_vectors():
    rng = np.random.default_rng(0)
    X = np.linspace(-10, 10, 100)[:, None]
    truth = np.sinc(X[:, 0] / np.pi)
    y = truth + 0.1 * rng.normal(size=100)
    machine = make_pipeline(RBFBasis(gamma=0.1), RVMRegressor(threshold=0.0)).fit(X, y)
    assert machine[-1].relevance_.sum() < 15
    assert np.sqrt(np.mean((machine.predict(X) - truth) ** 2)) < 0.05
    assert 1 / np.sqrt(machine[-1].noise_precision_) == pytest.approx(0.1, rel=0.2)


def test_kernel_machine_on_real_data():
    X, y = datasets.load_breast_cancer(return_X_y=True)
    machine = make_pipeline(StandardScaler(), RBFBasis(gamma=0.01), RVMClassifier())
    machine.fit(X[:300], y[:300])
    assert machine.score(X[300:], y[300:]) > 0.93
    assert machine[-1].relevance_.sum() < 30


@by_name
def test_intervals_cover_what_they_say_where_rows_are_few(model):
    rng = np.random.default_rng(0)
    z = []
    for _ in range(400):
        X, y = rng.normal(size=(9, 1)), 3 + rng.normal(size=9)
        fitted = clone(model).set_params(noise_precision=1.0, threshold=3).fit(X[:8], y[:8])
        if not fitted.relevance_.any():
            mean, std = fitted.predict(X[8:], return_std=True)
            z.append((y[8] - mean[0]) / std[0])
    # Within four standard errors of a standard deviation.
    assert np.std(z) == pytest.approx(1, abs=4 / np.sqrt(2 * len(z)))


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("Regressor", [RVMRegressor, VariationalDropoutRegressor])
def test_without_features_the_prediction_is_that_of_a_mean(Regressor, fit_intercept):
    """Student's t about the mean, if there is one, with the variance that n - 1 rows leave."""
    rng = np.random.default_rng(0)
    X, y = np.zeros((12, 1)), rng.normal(size=12)
    model = Regressor(fit_intercept=fit_intercept).fit(X, y)
    degrees = 12 - fit_intercept
    variance = y.var(ddof=1) * (1 + 1 / 12) if fit_intercept else np.mean(y**2)
    _, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(std, np.sqrt(variance * degrees / (degrees - 2)), rtol=1e-6)


@pytest.mark.parametrize("Regressor", [RVMRegressor, VariationalDropoutRegressor])
@pytest.mark.parametrize(("rows", "features"), [(10, 1), (20, 10)])
def test_two_standard_deviations_cover_new_targets_of_few_rows(Regressor, rows, features):
    inside = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        weights = 0 if features == 1 else rng.uniform(0.5, 1.5, features)
        X, new = rng.normal(size=(rows, features)), rng.normal(size=(200, features))
        y, target = ((Z * weights).sum(1) + 0.5 * rng.normal(size=len(Z)) for Z in (X, new))
        mean, std = Regressor().fit(X, y).predict(new, return_std=True)
        inside.append(np.mean(np.abs(target - mean) < 1.96 * std))
    # 0.87 to 0.88 with a normal distribution and no row for the intercept; 0.007 is its error.
    assert np.mean(inside) > 0.9
