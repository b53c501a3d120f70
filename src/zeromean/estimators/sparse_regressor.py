"""What the two regressors share: rows become a least-squares problem, its solution predicts."""

from __future__ import annotations

import math
from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import RegressorMixin, _fit_context
from sklearn.utils.validation import assert_all_finite, check_is_fitted, validate_data

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.likelihoods.quadratic import (
    ROUNDING,
    LeastSquares,
    from_moments,
    from_rows,
)
from zeromean.estimators.rows.magnitude import TOO_LARGE, check_features, check_target
from zeromean.estimators.rows.moments import Moments
from zeromean.estimators.rows.sources import ArrayRows, Chunk, Rows
from zeromean.estimators.rows.threads import one_blas_thread_each
from zeromean.estimators.sparse_linear_model import DTYPES, SparseLinearModel

LOG_TWO_PI = float(np.log(2 * np.pi))
# Above so many features, a matrix of all their correlations would not fit.
MOST_CORRELATED = 8192
# Up to so many features, the most that was measured, steps are so short that threads of BLAS wait
# for each other longer than they save.
NARROW = 1024
# Of freedom, for a variance of Student's t that is not much wider than its bulk.
FEWEST_DEGREES = 4.0
TOO_DIFFERENT = (
    "X and y differ so much in size that squares of their ratios do not fit float64; rescale them."
)


@dataclass(frozen=True)
class Learned:
    """What a solver finds; features are numbered among those that vary."""

    relevant: Indices  # in order
    weights: Array  # of the relevant features, in their own units
    covariance: Array
    log_alpha: Array | float  # of all
    noise_precision: float
    num_weights: float  # in effect: those that the data decide
    evidence: Array  # or its lower bound, by iteration
    num_iterations: int
    converged: bool


# About a constant target: no feature is relevant, and the noise is nil.
NOTHING = Learned(
    relevant=np.zeros(0, dtype=np.intp),
    weights=np.zeros(0),
    covariance=np.zeros((0, 0)),
    log_alpha=np.inf,
    noise_precision=np.inf,
    num_weights=0.0,
    evidence=np.array([np.inf]),
    num_iterations=0,
    converged=True,
)


class SparseRegressor(RegressorMixin, SparseLinearModel):
    """What the two regressors share."""

    noise_precision: Any

    @_fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X, y, sample_weight=None):
        """Add rows to those of earlier calls, and fit the model to all of them.

        The answer is that of `fit` on all rows together: sufficient statistics are kept. `fit`
        and `fit_chunks` keep none, so that after them this method starts anew.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Rows to add.
        y : array-like of shape (n_samples,)
            Their targets.
        sample_weight : array-like of shape (n_samples,), default=None
            How many times each row counts.

        Returns
        -------
        self : object
        """
        known = getattr(self, "_moments", None)
        if known is not None and sample_weight is not None and not np.any(sample_weight):
            # Rows that do not count: checked like others, and passed over, as `fit_chunks` does.
            self._checked(X, y, np.ones_like(np.asarray(sample_weight, dtype=float)), reset=False)
            return self
        rows = Chunk(*self._checked(X, y, sample_weight, reset=known is None))
        _refuse_too_wide(rows.X.shape[1])
        moments = _moments(rows)
        total = moments if known is None else known + moments
        self._fit_problem(from_moments(total, fit_intercept=self.fit_intercept))
        self._moments = total
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict targets.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Rows.
        return_std : bool, default=False
            Whether to return the standard deviation of each target too: of noise, weights and
            intercept, and where the noise is learned, of Student's t distribution with as many
            degrees of freedom as rows are left for it.

        Returns
        -------
        mean : ndarray of shape (n_samples,)
        std : ndarray of shape (n_samples,)
            Only if `return_std`.
        """
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=DTYPES, reset=False)
        mean = X @ self.coef_ + self.intercept_
        if not return_std:
            return mean
        kept = np.flatnonzero(self.relevance_)
        deviations = X[:, kept]
        deviations = deviations.toarray() if sparse.issparse(deviations) else deviations
        deviations = deviations - self._centre[kept]
        variance = np.einsum("ij,ij->i", deviations @ self.covariance_, deviations)
        variance = variance + self._intercept_variance + 1 / self.noise_precision_
        return mean, np.sqrt(variance * self._t_variance)

    def _fit(self, rows: Rows):
        self._moments = None
        if isinstance(rows, ArrayRows):
            num_rows, num_features = rows.X.shape
            if num_features > min(num_rows, MOST_CORRELATED):
                return self._fit_problem(_wide_problem(rows.whole(), self.fit_intercept))
            moments = _moments(rows.whole())
        else:
            moments = rows.reduce(_streamed_moments)
        return self._fit_problem(from_moments(moments, fit_intercept=self.fit_intercept))

    def _fit_problem(self, problem: LeastSquares):
        if problem.count <= 0:
            raise ValueError("sample_weight must not be zero for every row.")
        spread = math.sqrt(max(problem.target_square / problem.count, 0.0))
        constant = spread <= ROUNDING * abs(problem.target_mean)
        given = isinstance(self.noise_precision, Real)
        with one_blas_thread_each() if len(problem.mean) <= NARROW else nullcontext():
            with np.errstate(over="ignore", under="ignore", divide="ignore"):
                learned = NOTHING if constant and not given else self._solve(problem)
        variance = learned.covariance.diagonal()
        if not (np.isfinite(learned.covariance).all() and (variance > 0).all()):
            raise ValueError(TOO_DIFFERENT)
        level = problem.count * learned.noise_precision
        if level < np.finfo(np.float64).tiny:  # Its inverse is a variance.
            raise ValueError(TOO_LARGE)
        self._warn_unless(learned.converged)
        relevant = problem.features[learned.relevant]
        num_features = len(problem.mean)
        self.coef_ = np.zeros(num_features)
        self.coef_[relevant] = learned.weights
        self.intercept_ = problem.target_mean - float(problem.mean @ self.coef_)
        self.log_alpha_ = np.full(num_features, np.inf)
        self.log_alpha_[problem.features] = learned.log_alpha
        self.relevance_ = np.zeros(num_features, dtype=bool)
        self.relevance_[relevant] = True
        self.covariance_ = learned.covariance
        self.noise_precision_ = learned.noise_precision
        # It has no prior, and belongs to the means of the features.
        self._intercept_variance = 1 / level if self.fit_intercept else 0.0
        rows_left = problem.count - self.fit_intercept - learned.num_weights
        self._t_variance = 1.0 if given else _t_variance(rows_left)
        self.elbo_ = learned.evidence
        self.n_iter_ = learned.num_iterations
        self._centre = problem.mean
        return self

    @abstractmethod
    def _solve(self, problem: LeastSquares) -> Learned: ...


def _t_variance(degrees: float) -> float:
    """Variance of Student's t; below the fewest degrees, where it grows without bound, of those."""
    degrees = max(degrees, FEWEST_DEGREES)
    return degrees / (degrees - 2)


def _moments(rows: Chunk) -> Moments:
    # What is not finite in X shows in its moments, which are smaller.
    with np.errstate(invalid="ignore", over="ignore"):
        moments = Moments.of(rows)
    if not moments.is_finite():
        assert_all_finite(rows.X, input_name="X")
        assert_all_finite(rows.y, input_name="y")
        raise ValueError(TOO_LARGE)
    if moments.count > 0:
        check_features(rows, moments.gram.diagonal())
        check_target(rows, moments.target_square)
    return moments


def _streamed_moments(rows: Chunk) -> Moments:
    _refuse_too_wide(rows.X.shape[1])
    return _moments(rows)


def _refuse_too_wide(num_features: int) -> None:
    if num_features > MOST_CORRELATED:
        raise ValueError(
            "Streaming keeps the correlations of all features, so there may be up to "
            f"{MOST_CORRELATED:,} of them, got {num_features:,}; give fit all rows in one array or "
            "sparse matrix."
        )


def _wide_problem(rows: Chunk, fit_intercept: bool) -> LeastSquares:
    assert_all_finite(rows.X, input_name="X")
    with np.errstate(over="ignore", invalid="ignore"):
        problem = from_rows(rows, fit_intercept=fit_intercept)
    if not np.isfinite([*problem.scale, problem.target_square]).all():
        raise ValueError(TOO_LARGE)
    square = np.zeros(rows.X.shape[1])
    square[problem.features] = problem.scale**2
    check_features(rows, square)
    check_target(rows, problem.target_square)
    return problem
