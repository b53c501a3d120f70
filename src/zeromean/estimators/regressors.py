"""Sparse Bayesian linear regression: variational dropout and the relevance vector machine."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, RegressorMixin, _fit_context
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import (
    _check_sample_weight,
    assert_all_finite,
    check_is_fitted,
    check_scalar,
    validate_data,
)

from zeromean.estimators.dropout import NoiseTerm, Solution, minimize_dropout
from zeromean.estimators.evidence import search_evidence
from zeromean.estimators.moments import Moments
from zeromean.estimators.penalty import Array, dropout_penalty
from zeromean.estimators.prices import prices_of
from zeromean.estimators.quadratic import ROUNDING, Indices, LeastSquares, from_moments, from_rows
from zeromean.estimators.rows import ArrayRows, ChunkRows, DaskRows, Rows, is_dask

LOG_TWO_PI = float(np.log(2 * np.pi))
# Above so many features, a matrix of all their correlations would not fit.
MOST_CORRELATED = 8192
# The smallest noise variance that is learned, in variances of the target: above rounding errors.
NOISE_FLOOR = 1e-8


@dataclass(frozen=True)
class _Learned:
    """What a solver finds; features are numbered among those that vary."""

    relevant: Indices  # in order
    weights: Array  # of the relevant features, in their own units
    covariance: Array
    log_alpha: Array | float  # of all
    noise_precision: float
    evidence: Array  # or its lower bound, by iteration, without the constant
    num_iterations: int


# About a constant target: no feature is relevant, and the noise is nil.
_NOTHING = _Learned(
    np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros((0, 0)), np.inf, np.inf, np.array([np.inf]), 0
)


class _SparseRegressor(RegressorMixin, BaseEstimator, ABC):
    """What the two regressors share: where rows come from, and prediction."""

    fit_intercept: bool
    max_iter: int
    tol: float

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "fit_intercept": ["boolean"],
        "max_iter": [Interval(Real, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="neither")],
    }

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y, sample_weight=None):
        """Fit the model.

        Parameters
        ----------
        X : array-like, sparse matrix or dask.array of shape (n_samples, n_features)
            Rows. A memory map is read in slices; a dask.array is reduced on its own scheduler.
        y : array-like of shape (n_samples,)
            Targets.
        sample_weight : array-like of shape (n_samples,), default=None
            How many times each row counts.

        Returns
        -------
        self : object
        """
        if is_dask(X):
            _check_dask(self, X)
            self._moments = None
            return self._fit_moments(DaskRows(X, y, sample_weight).reduce(_dask_moments))
        X, y, weight = self._validated(X, y, sample_weight, reset=True)
        self._moments = None
        if X.shape[1] > min(X.shape[0], MOST_CORRELATED):
            assert_all_finite(X, input_name="X")
            return self._fit(from_rows(X, y, weight, fit_intercept=self.fit_intercept))
        return self._fit_moments(_moments_of_slices(X, y, weight))

    @_fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X, y, sample_weight=None):
        """Add rows to those of earlier calls, and fit the model to all of them.

        The answer is that of `fit` on all rows together: only sufficient statistics are kept.

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
        X, y, weight = self._validated(X, y, sample_weight, reset=known is None)
        moments = _moments_of_slices(X, y, weight)
        self._moments = moments if known is None else known + moments
        return self._fit_moments(self._moments)

    @_fit_context(prefer_skip_nested_validation=True)
    def fit_chunks(self, chunks: Iterable[tuple[Any, ...]] | Callable[[], Iterable]):
        """Fit the model to rows that never lie in memory together, in one pass.

        Parameters
        ----------
        chunks : iterable, or function that returns one
            Of tuples (X, y) or (X, y, sample_weight).

        Returns
        -------
        self : object
        """
        self._moments = None
        first = True

        def check(X, y, sample_weight=None):
            nonlocal first
            checked = self._validated(X, y, sample_weight, reset=first)
            first = False
            return checked

        rows: Rows = ChunkRows(chunks, check)
        return self._fit_moments(rows.reduce(_moments_of_slices))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict targets.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Rows.
        return_std : bool, default=False
            Whether to return the standard deviation of each target too, noise included.

        Returns
        -------
        mean : ndarray of shape (n_samples,)
        std : ndarray of shape (n_samples,)
            Only if `return_std`.
        """
        check_is_fitted(self)
        dtypes = [np.float64, np.float32]
        X = validate_data(self, X, accept_sparse="csr", dtype=dtypes, reset=False)
        mean = X @ self.coef_ + self.intercept_
        if not return_std:
            return mean
        kept = np.flatnonzero(self.relevance_)
        deviations = X[:, kept]
        deviations = deviations.toarray() if sparse.issparse(deviations) else deviations
        deviations = deviations - self._centre[kept]
        variance = np.einsum("ij,ij->i", deviations @ self.covariance_, deviations)
        return mean, np.sqrt(variance + 1 / self.noise_precision_)

    def _validated(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool
    ) -> tuple[Any, Any, Any]:
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse=["csr", "csc"],
            dtype=[np.float64, np.float32],
            y_numeric=True,
            ensure_all_finite=False,
            reset=reset,
        )
        y = np.asarray(y, dtype=np.float64)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(
                sample_weight, X, dtype=np.float64, ensure_non_negative=True
            )
        if sparse.issparse(X):
            X = sparse.csr_array(X)
        return X, y, sample_weight

    def _fit_moments(self, moments: Moments):
        return self._fit(from_moments(moments, fit_intercept=self.fit_intercept))

    def _fit(self, problem: LeastSquares):
        if problem.count <= 0:
            raise ValueError("sample_weight must not be zero for every row.")
        constant = problem.target_square <= problem.count * (ROUNDING * problem.target_mean) ** 2
        learned = _NOTHING if constant else self._solve(problem)
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
        self.elbo_ = learned.evidence - 0.5 * problem.count * LOG_TWO_PI
        self.n_iter_ = learned.num_iterations
        self._centre = problem.mean
        return self

    def _warn(self, converged: bool) -> None:
        if not converged:
            warnings.warn(
                f"{type(self).__name__} did not converge in max_iter={self.max_iter} iterations; "
                "raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=4,
            )

    @abstractmethod
    def _solve(self, problem: LeastSquares) -> _Learned: ...

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class VariationalDropoutRegressor(_SparseRegressor):
    """Linear regression by variational dropout: finds the relevant features by itself.

    Every weight has a posterior N(w, α w²) and a log-uniform prior; w, α and, if wanted, the noise
    precision maximise the evidence lower bound, with the exact KL divergence. A feature is relevant
    where log α is below a threshold; the weights of all others are exactly zero. Their units do not
    matter.

    Parameters
    ----------
    noise_precision : float or {"evidence", "elbo"}, default="evidence"
        Precision (1 / variance) of the noise, if known. Otherwise learned: "elbo" maximises the
        lower bound over it too, which overestimates it where features are not much fewer than rows,
        and for more features than rows has no maximum; "evidence" takes the one that
        `RVMRegressor` finds, which does not have this flaw.
    threshold : float, default=3.0
        Features with log α below it are relevant.
    fit_intercept : bool, default=True
        Whether to centre features and target. The intercept has no prior.
    max_iter : int, default=300
        Newton steps, at most.
    tol : float, default=1e-8
        The fit ends when an iteration gains less, in nats.

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,)
        Means of the weights; 0 for irrelevant features.
    intercept_ : float
        Intercept.
    log_alpha_ : ndarray of shape (n_features,)
        log α; infinite where a weight is zero at the optimum.
    relevance_ : ndarray of shape (n_features,)
        Whether a feature is relevant.
    covariance_ : ndarray of shape (n_relevant, n_relevant)
        Posterior covariance of the weights of relevant features, which is diagonal.
    noise_precision_ : float
        Precision of the noise.
    elbo_ : ndarray of shape (n_iter_ + 1,)
        The lower bound, from the empty model on; it never falls.
    n_iter_ : int
        Newton steps.

    References
    ----------
    D. Molchanov and A. Ashuha, Variational dropout for deep neural networks and linear models,
    2016. J. Hron, A. Matthews and Z. Ghahramani, Variational Gaussian dropout is not Bayesian, 2017
    (the exact KL).

    Examples
    --------
    >>> import numpy as np
    >>> from zeromean.estimators import VariationalDropoutRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 30))
    >>> y = 2 * X[:, 3] - X[:, 7] + rng.normal(size=200)
    >>> model = VariationalDropoutRegressor().fit(X, y)
    >>> bool(model.relevance_[3] and model.relevance_[7])
    True
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **_SparseRegressor._parameter_constraints,
        "noise_precision": [
            StrOptions({"evidence", "elbo"}),
            Interval(Real, 0, None, closed="neither"),
        ],
        "threshold": [Interval(Real, None, None, closed="neither")],
    }

    def __init__(
        self,
        *,
        noise_precision: float | str = "evidence",
        threshold: float = 3.0,
        fit_intercept: bool = True,
        max_iter: int = 300,
        tol: float = 1e-8,
    ):
        self.noise_precision = noise_precision
        self.threshold = threshold
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol

    def _solve(self, problem: LeastSquares) -> _Learned:
        noise = _noise_term(problem, fixed=self.noise_precision != "elbo")
        if self.noise_precision == "evidence":
            precision = self._noise_by_evidence(problem)
        elif self.noise_precision == "elbo":
            precision = noise.count / noise.square
        else:
            precision = self.noise_precision
        solution = minimize_dropout(
            problem.quadratic,
            noise,
            Solution(np.zeros(len(problem.features)), float(np.sqrt(precision))),
            max_iter=self.max_iter,
            tol=self.tol,
        )
        self._warn(solution.converged)
        log_alpha = np.log(dropout_penalty(solution.v).alpha)
        weights = solution.v / (solution.tau * problem.scale)
        relevant = np.flatnonzero(log_alpha < self.threshold)
        variance = np.exp(log_alpha[relevant]) * weights[relevant] ** 2
        return _Learned(
            relevant,
            weights[relevant],
            np.diag(variance),
            log_alpha,
            solution.tau**2,
            -np.array(solution.objective),
            solution.num_iterations,
        )

    def _noise_by_evidence(self, problem: LeastSquares) -> float:
        noise = _noise_term(problem, fixed=False)
        return search_evidence(
            problem.quadratic,
            noise,
            noise.count / noise.square,
            prices=prices_of("auto", len(problem.mean)),
            max_iter=self.max_iter,
            tol=self.tol,
        ).noise_precision


class RVMRegressor(_SparseRegressor):
    """Linear regression by evidence maximisation: the relevance vector machine, or ARD.

    Every weight has a prior N(0, 1/α) of its own; the α and the noise precision maximise the
    evidence, which is what remains when the weights are integrated out. A feature is relevant if
    the evidence would fall by more than a threshold without it; only those are in the model.

    Parameters
    ----------
    noise_precision : float, default=None
        Precision (1 / variance) of the noise, if known; otherwise learned.
    threshold : float or "auto", default="auto"
        Nats of log evidence that a feature has to add to be relevant: log prior odds against it.
        "auto" is log((n_features - n) / (n + 1)) for a feature beside n relevant ones, and not
        below 0: a uniform prior over the number of relevant features. 0 is the classical machine,
        which finds about a third of all irrelevant features relevant.
    fit_intercept : bool, default=True
        Whether to centre features and target. The intercept has no prior.
    max_iter : int, default=300
        Iterations, at most.
    tol : float, default=1e-8
        The fit ends when an iteration gains less, in nats.

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,)
        Posterior means of the weights; 0 for irrelevant features.
    intercept_ : float
        Intercept.
    log_alpha_ : ndarray of shape (n_features,)
        log of the prior precisions of the weights; infinite for irrelevant features.
    relevance_ : ndarray of shape (n_features,)
        Whether a feature is relevant.
    covariance_ : ndarray of shape (n_relevant, n_relevant)
        Posterior covariance of the weights of relevant features, in the order of the features.
    noise_precision_ : float
        Precision of the noise.
    elbo_ : ndarray of shape (n_iter_ + 1,)
        The log evidence less the thresholds of the relevant features; it never falls.
    n_iter_ : int
        Iterations.

    References
    ----------
    M. Tipping and A. Faul, Fast marginal likelihood maximisation for sparse Bayesian models, 2003.

    Examples
    --------
    >>> import numpy as np
    >>> from zeromean.estimators import RVMRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 30))
    >>> y = 2 * X[:, 3] - X[:, 7] + rng.normal(size=200)
    >>> np.flatnonzero(RVMRegressor().fit(X, y).relevance_)
    array([3, 7])
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **_SparseRegressor._parameter_constraints,
        "noise_precision": [None, Interval(Real, 0, None, closed="neither")],
        "threshold": [StrOptions({"auto"}), Interval(Real, 0, None, closed="left")],
    }

    def __init__(
        self,
        *,
        noise_precision: float | None = None,
        threshold: float | str = "auto",
        fit_intercept: bool = True,
        max_iter: int = 300,
        tol: float = 1e-8,
    ):
        self.noise_precision = noise_precision
        self.threshold = threshold
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol

    def _solve(self, problem: LeastSquares) -> _Learned:
        noise = _noise_term(problem, fixed=self.noise_precision is not None)
        start = self.noise_precision or noise.count / noise.square
        solution = search_evidence(
            problem.quadratic,
            noise,
            start,
            prices=prices_of(self.threshold, len(problem.mean)),
            max_iter=self.max_iter,
            tol=self.tol,
        )
        self._warn(solution.converged)
        order = np.argsort(solution.features)
        relevant, precision = solution.features[order], solution.noise_precision
        scale = problem.scale[relevant]
        covariance = solution.covariance[np.ix_(order, order)] / np.outer(scale, scale)
        log_alpha = np.full(len(problem.features), np.inf)
        log_alpha[relevant] = np.log(solution.precision[order] * precision * scale**2)
        return _Learned(
            relevant,
            solution.mean[order] / scale,
            covariance / precision,
            log_alpha,
            precision,
            np.array(solution.objective),
            solution.num_iterations,
        )


def _noise_term(problem: LeastSquares, *, fixed: bool) -> NoiseTerm:
    # Without a floor, the noise precision of data that are exactly linear would be infinite.
    floor = 1.0 if fixed else 1 + NOISE_FLOOR
    return NoiseTerm(problem.count, problem.target_square * floor, fixed)


def _moments_of_slices(X: Any, y: Any, weight: Any) -> Moments:
    # What is not finite in X shows in its moments, which are smaller.
    with np.errstate(invalid="ignore", over="ignore"):
        moments = ArrayRows(X, y, weight).reduce(Moments.of)
    if not moments.is_finite():
        assert_all_finite(X, input_name="X")
        assert_all_finite(y, input_name="y")
        raise ValueError("Squares of X or y are too large for float64; rescale them.")
    return moments


def _dask_moments(X: Any, y: Any, weight: Any) -> Moments:
    weight = None if weight is None else np.asarray(weight, dtype=np.float64)
    return _moments_of_slices(X, np.asarray(y, dtype=np.float64), weight)


def _check_dask(estimator: BaseEstimator, X: Any) -> None:
    if X.ndim != 2:
        raise ValueError(f"Expected 2D array, got an array of {X.ndim} dimensions instead.")
    check_scalar(X.shape[1], "number of features", int, min_val=1)
    estimator.n_features_in_ = X.shape[1]  # type: ignore[attr-defined]
