"""Where features are more than rows: products that are kept, steps that are held back."""

import numpy as np
import pytest
from scipy import sparse

from zeromean.estimators import RVMClassifier, RVMRegressor
from zeromean.estimators.dropout.joint import JointModel
from zeromean.estimators.dropout.posterior import DropoutPosterior
from zeromean.estimators.evidence import search
from zeromean.estimators.likelihoods import rows_quadratic
from zeromean.estimators.likelihoods.log_sigmoid import Integral
from zeromean.estimators.likelihoods.logistic import DataTerm
from zeromean.estimators.likelihoods.rows_quadratic import RowsQuadratic
from zeromean.estimators.rows.columns import Scaling
from zeromean.estimators.rows.scaled import made_ready
from zeromean.estimators.rows.sources import ArrayRows


@pytest.mark.parametrize("most_kept", [0, 200, 2**20])
@pytest.mark.parametrize("form", [np.asarray, sparse.csc_array], ids=["dense", "sparse"])
def test_products_are_the_same_whatever_is_kept(form, most_kept, monkeypatch):
    monkeypatch.setattr(rows_quadratic, "MOST_KEPT", most_kept)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 50)) * (rng.random((20, 50)) < 0.3)
    weight, mean, scale = rng.random(20), rng.normal(size=50), 1 + rng.random(50)
    quadratic = RowsQuadratic(form(X), weight, mean, scale, np.zeros(50))
    z = np.sqrt(weight)[:, None] * (X - mean) / scale
    full = z.T @ z
    for _ in range(20):
        some, others = (rng.permutation(50)[: rng.integers(1, 8)] for _ in range(2))
        v = rng.normal(size=len(some))
        np.testing.assert_allclose(
            quadratic.block(some, others), full[np.ix_(some, others)], rtol=1e-10, atol=1e-12
        )
        np.testing.assert_allclose(
            quadratic.product(some, v), full[:, some] @ v, rtol=1e-10, atol=1e-12
        )
    everything = np.arange(50)
    np.testing.assert_allclose(
        quadratic.block(everything, everything), full, rtol=1e-10, atol=1e-12
    )


def test_features_far_from_zero_keep_their_digits():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 200))
    y = X[:, 0] - X[:, 1] + 0.1 * rng.normal(size=60)
    near, far = RVMRegressor().fit(X, y), RVMRegressor().fit(X + 1e6, y)
    np.testing.assert_array_equal(near.relevance_, far.relevance_)
    np.testing.assert_allclose(near.coef_, far.coef_, rtol=1e-5, atol=1e-7)


def _term(rng, rows_of):
    X = rng.normal(size=(80, 6)) * (rng.random((80, 6)) < 0.5)
    y = (X[:, 0] + rng.normal(size=80) > 0).astype(int)
    scaling = Scaling(X.mean(axis=0), X.std(axis=0))
    rows = rows_of(X, y, scaling)
    return DataTerm(rows, 80.0, 1, scaling, Integral(), True, 0.0)


def test_rows_made_ready_say_what_they_said():
    dense = _term(np.random.default_rng(0), lambda X, y, scaling: ArrayRows(X, y))
    ready = _term(
        np.random.default_rng(0),
        lambda X, y, scaling: made_ready(ArrayRows(sparse.csr_array(X), y), scaling),
    )
    posterior = DropoutPosterior(np.array([4, 1]), np.array([0.5, -1.0]), np.array([0.2, 2.0]), 0.3)
    # In a pass over other features, and then over these.
    ready.curvatures(posterior, np.array([4, 1, 2]))
    for name in ("value", "slope", "intercept_slope", "spread"):
        expected = getattr(dense.slopes(posterior), name)
        np.testing.assert_allclose(getattr(ready.slopes(posterior), name), expected, rtol=1e-10)


def test_joint_model_has_the_derivatives_of_the_bound():
    term = _term(np.random.default_rng(1), lambda X, y, scaling: ArrayRows(X, y))
    point = np.array([0.5, -1.0, 0.3, np.log(0.2), np.log(0.7)])

    def posterior(point):
        return DropoutPosterior(np.array([4, 1]), point[:2], np.exp(point[3:]), float(point[2]))

    def bound(point):
        return term.slopes(posterior(point)).value - posterior(point).kl()

    def model(point):
        model = JointModel.about(term, posterior(point), term.slopes(posterior(point)))
        assert model is not None
        return model

    steps = 1e-5 * np.eye(5)
    slope = [(bound(point + step) - bound(point - step)) / 2e-5 for step in steps]
    np.testing.assert_allclose(model(point).slope, slope, atol=1e-6)
    curvature = [(model(point - s).slope - model(point + s).slope) / 2e-5 for s in steps]
    np.testing.assert_allclose(model(point).curvature, curvature, atol=1e-5)


def test_steps_that_are_held_back_are_short_and_go_up():
    term = _term(np.random.default_rng(1), lambda X, y, scaling: ArrayRows(X, y))
    before = DropoutPosterior(np.array([0, 1]), np.array([0.5, -1.0]), np.array([0.2, 0.7]), 0.3)
    at = term.slopes(before)
    model = JointModel.about(term, before, at)
    assert model is not None
    short = model.step(before, 1e4)
    assert short is not None
    assert not short.left_over
    assert np.abs(short.posterior.mean - before.mean).max() < 1e-2
    rise = term.slopes(short.posterior).value - short.posterior.kl() - (at.value - before.kl())
    assert 0 < rise < 0.1


def test_a_larger_start_goes_on_where_it_is_nearly_as_good(monkeypatch):
    # As if sixteen features were many.
    monkeypatch.setattr(search, "MOST_QUICK", 16)
    rng = np.random.default_rng(1)
    X = rng.normal(size=(200, 400))
    weights = rng.choice([-1, 1], 60) * rng.uniform(0.5, 1.5, 60)
    y = X[:, :60] @ weights + 0.3 * rng.normal(size=200)
    assert RVMRegressor().fit(X, y).relevance_[:60].all()


def test_a_larger_start_is_given_up_where_chance_fills_it(monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 1000))
    y = X[:, 0] + rng.normal(size=200)
    whole = RVMRegressor().fit(X, y)
    most = []
    improve = search.maximize_evidence

    def watched(*arguments, **options):
        solution = improve(*arguments, **options)
        most.append(len(solution.features))
        return solution

    monkeypatch.setattr(search, "maximize_evidence", watched)
    monkeypatch.setattr(search, "MOST_QUICK", 16)
    model = RVMRegressor().fit(X, y)
    np.testing.assert_allclose(model.coef_, whole.coef_, rtol=1e-6)
    assert 200 / 3 <= max(most) < 200 / 2 - 2


def test_sparse_text_is_classified_by_words_that_matter():
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, 1001)
    words = rng.choice(1000, (1300, 60), p=frequency / frequency.sum())
    X = sparse.csr_array(
        (np.ones(words.size), words.ravel(), np.arange(0, words.size + 1, 60)), (1300, 1000)
    )
    X.sum_duplicates()
    log_odds = 2.0 * (X[:, [12]] - X[:, [15]]).toarray()[:, 0]
    y = log_odds > rng.logistic(size=1300)
    model = RVMClassifier().fit(X[:300], y[:300])
    assert model.relevance_[[12, 15]].all()
    assert (np.diff(model.elbo_) >= 0).all()
    chance = max(y[300:].mean(), 1 - y[300:].mean())
    assert model.score(X[300:], y[300:]) > chance + 0.05
