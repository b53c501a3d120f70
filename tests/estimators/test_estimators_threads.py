"""Rows shared out to threads: the same moments, and BLAS's own limits as they were."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from zeromean.estimators.rows.moments import FEWEST_PRODUCTS, Moments
from zeromean.estimators.rows.sources import Chunk
from zeromean.estimators.rows.threads import one_blas_thread_each


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    num_features = 60
    num_rows = FEWEST_PRODUCTS // num_features**2 + 1
    X = rng.normal(size=(num_rows, num_features)) + 1e4
    return Chunk(X, X[:, 0] - X[:, 1], rng.integers(0, 3, num_rows).astype(float))


def limits():
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_moments_do_not_depend_on_threads(rows, num_threads):
    with threadpool_limits(num_threads, "blas"):
        before = limits()
        moments = Moments.of(rows)
        assert limits() == before
    covariance = np.cov(rows.X.T, fweights=rows.weight.astype(int), bias=True)
    np.testing.assert_allclose(moments.gram / moments.count, covariance, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(moments.mean, np.average(rows.X, axis=0, weights=rows.weight))
    np.testing.assert_allclose(moments.cross, moments.gram[0] - moments.gram[1], atol=1e-5)


def test_threads_of_the_caller(rows):
    """Several at once neither wait for each other for ever nor leave BLAS limited."""
    with threadpool_limits(2, "blas"):
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(Moments.of, [rows] * 8))
        assert set(limits()) == {2}
    for moments in results:
        np.testing.assert_allclose(moments.gram, results[0].gram, rtol=1e-10, atol=1e-6)


def test_limits_come_back_after_an_error():
    def fail():
        with one_blas_thread_each() as num_threads:
            assert num_threads == 2
            assert set(limits()) == {1}
            with one_blas_thread_each() as within:
                assert within == 1
            raise KeyError

    with threadpool_limits(2, "blas"):
        with pytest.raises(KeyError):
            fail()
        assert set(limits()) == {2}
