"""Rows that do not lie in memory together: chunks, memory maps and Dask give the same answer."""

import numpy as np
import pytest
from sklearn.base import clone

from zeromean.estimators import (
    RVMClassifier,
    RVMRegressor,
    VariationalDropoutClassifier,
    VariationalDropoutRegressor,
)

REGRESSORS = [VariationalDropoutRegressor(), RVMRegressor()]
CLASSIFIERS = [VariationalDropoutClassifier(), RVMClassifier()]
names = {"ids": lambda m: type(m).__name__}


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    # Sorted by the first feature, so that chunks differ.
    X = rng.normal(size=(1000, 15)) * np.geomspace(0.1, 100, 15) + 5
    X = X[np.argsort(X[:, 0])]
    y = X @ np.r_[3, -0.2, np.zeros(13)] + rng.normal(size=1000)
    return X, y, rng.integers(0, 4, size=1000).astype(float)


def targets(model, y):
    return y if model in REGRESSORS else np.where(y > np.median(y), "b", "a")


def assert_same(first, second):
    np.testing.assert_allclose(first.coef_, second.coef_, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(first.intercept_, second.intercept_, rtol=1e-8)
    np.testing.assert_array_equal(first.relevance_, second.relevance_)


@pytest.mark.parametrize("model", REGRESSORS, **names)
def test_partial_fit_is_fit(model, rows):
    X, y, weight = rows
    whole = clone(model).fit(X, y, sample_weight=weight)
    parts = clone(model)
    for part in np.array_split(np.arange(1000), 7):
        parts.partial_fit(X[part], y[part], sample_weight=weight[part])
    assert_same(parts, whole)
    assert parts.elbo_[-1] == pytest.approx(whole.elbo_[-1], rel=1e-9)
    # A new fit forgets.
    assert_same(parts.fit(X[:500], y[:500]), clone(model).fit(X[:500], y[:500]))
    assert_same(parts.partial_fit(X, y), clone(model).fit(X, y))


@pytest.mark.parametrize("model", REGRESSORS + CLASSIFIERS, **names)
def test_chunks_are_fit(model, rows):
    X, y, weight = rows
    y = targets(model, y)
    whole = clone(model).fit(X, y, sample_weight=weight)
    parts = np.array_split(np.arange(1000), 7)
    chunks = [(X[part], y[part], weight[part]) for part in parts]
    assert_same(clone(model).fit_chunks(chunks), whole)
    assert_same(clone(model).fit_chunks(lambda: iter(chunks)), whole)


@pytest.mark.parametrize("model", REGRESSORS, **names)
def test_one_pass_is_enough_for_regression(model, rows):
    X, y, _ = rows
    chunks = ((X[start : start + 100], y[start : start + 100]) for start in range(0, 1000, 100))
    assert_same(clone(model).fit_chunks(chunks), clone(model).fit(X, y))


@pytest.mark.parametrize("model", CLASSIFIERS, **names)
def test_chunks_that_can_be_read_once_are_refused_for_classification(model, rows):
    X, y, _ = rows
    once = iter([(X, targets(model, y))])
    with pytest.raises(ValueError, match="chunks gave no rows; several passes need"):
        clone(model).fit_chunks(once)


@pytest.mark.parametrize("model", REGRESSORS + CLASSIFIERS, **names)
def test_chunks_must_agree(model, rows):
    X, y, _ = rows
    y = targets(model, y)
    with pytest.raises(ValueError, match="expecting 15 features"):
        clone(model).fit_chunks([(X, y), (X[:, :3], y)])


@pytest.mark.parametrize("model", REGRESSORS + CLASSIFIERS, **names)
def test_memory_map_is_fit(model, rows, tmp_path):
    X, y, _ = rows
    mapped = np.memmap(tmp_path / "X", dtype=np.float64, mode="w+", shape=X.shape)
    mapped[:] = X
    mapped.flush()
    read_only = np.memmap(tmp_path / "X", dtype=np.float64, mode="r", shape=X.shape)
    y = targets(model, y)
    assert_same(clone(model).fit(read_only, y), clone(model).fit(X, y))


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as local,
        distributed.Client(local) as client,
    ):
        yield client


@pytest.mark.parametrize("model", REGRESSORS + CLASSIFIERS, **names)
def test_dask_array_is_reduced_on_its_cluster(model, rows, cluster):
    array = pytest.importorskip("dask.array")
    X, y, weight = rows
    y = targets(model, y)
    whole = clone(model).fit(X, y, sample_weight=weight)
    blocks = array.from_array(X, chunks=(130, 4))
    there = clone(model).fit(blocks, array.from_array(y, chunks=400), sample_weight=weight)
    assert_same(there, whole)
    assert len(cluster.scheduler_info()["workers"]) == 2
    predictions = blocks.rechunk({1: -1}).map_blocks(there.predict, drop_axis=1, dtype=y.dtype)
    if model in REGRESSORS:
        np.testing.assert_allclose(predictions.compute(), there.predict(X), rtol=1e-12)
    else:
        np.testing.assert_array_equal(predictions.compute(), there.predict(X))


@pytest.mark.parametrize("model", REGRESSORS + CLASSIFIERS, **names)
def test_dask_array_with_nan_is_refused(model, rows):
    array = pytest.importorskip("dask.array")
    X, y, _ = rows
    X[3, 3] = np.nan
    with pytest.raises(ValueError, match="contains NaN"):
        clone(model).fit(array.from_array(X), targets(model, y))


@pytest.mark.parametrize("Regressor", [RVMRegressor, VariationalDropoutRegressor])
def test_a_piece_without_weight_is_passed_over(Regressor):
    rng = np.random.default_rng(0)
    X, weight = rng.normal(size=(300, 4)), np.ones(300)
    y = X[:, 0] + 0.1 * rng.normal(size=300)
    weight[100:200] = 0
    expected = Regressor().fit(X, y, sample_weight=weight)
    model = Regressor()
    for piece in np.split(np.arange(300), 3):
        model.partial_fit(X[piece], y[piece], sample_weight=weight[piece])
    np.testing.assert_allclose(model.coef_, expected.coef_, atol=1e-8)
    with pytest.raises(ValueError, match="features"):
        model.partial_fit(X[:10, :3], y[:10], sample_weight=np.zeros(10))
