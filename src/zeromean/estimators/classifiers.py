"""Sparse Bayesian logistic regression: variational dropout and the relevance vector machine."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral as IntegralNumber
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, _fit_context
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from zeromean.estimators.dropout_logistic import DropoutPosterior, fit_dropout_logistic
from zeromean.estimators.evidence_logistic import EvidencePosterior, fit_evidence_logistic
from zeromean.estimators.logistic import (
    Features,
    Integral,
    Posterior,
    Scaling,
    average_probability,
)
from zeromean.estimators.moments import Overview
from zeromean.estimators.penalty import Array
from zeromean.estimators.prices import prices_of
from zeromean.estimators.quadratic import ROUNDING
from zeromean.estimators.rows import ArrayRows, ChunkRows, DaskRows, Rows, is_dask

# Probabilities of separable classes can underflow.
TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class _Problem:
    """One class against the rest."""

    rows: Rows
    label: Any
    scaling: Scaling
    start_intercept: float


class _SparseClassifier(ClassifierMixin, BaseEstimator, ABC):
    """What the two classifiers share: where rows come from, one against the rest, prediction."""

    integration: str
    n_draws: int
    fit_intercept: bool
    max_iter: int
    tol: float
    random_state: Any

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "integration": [StrOptions({"quadrature", "sampling"})],
        "n_draws": [Interval(IntegralNumber, 2, None, closed="left")],
        "fit_intercept": ["boolean"],
        "max_iter": [Interval(Real, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="neither")],
        "random_state": ["random_state"],
    }

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y, sample_weight=None):
        """Fit the model.

        Parameters
        ----------
        X : array-like, sparse matrix or dask.array of shape (n_samples, n_features)
            Rows. A memory map is read in slices; a dask.array is reduced on its own scheduler.
        y : array-like of shape (n_samples,)
            Classes.
        sample_weight : array-like of shape (n_samples,), default=None
            How many times each row counts.

        Returns
        -------
        self : object
        """
        if is_dask(X):
            self.n_features_in_ = X.shape[1]
            return self._fit(DaskRows(X, y, sample_weight))
        return self._fit(ArrayRows(*self._validated(X, y, sample_weight, reset=True)))

    @_fit_context(prefer_skip_nested_validation=True)
    def fit_chunks(self, chunks: Iterable[tuple[Any, ...]] | Callable[[], Iterable]):
        """Fit the model to rows that never lie in memory together, in several passes.

        Parameters
        ----------
        chunks : iterable that can be read again, or function that returns an iterator
            Of tuples (X, y) or (X, y, sample_weight).

        Returns
        -------
        self : object
        """
        first = True

        def check(X, y, sample_weight=None):
            nonlocal first
            checked = self._validated(X, y, sample_weight, reset=first)
            first = False
            return checked

        return self._fit(ChunkRows(chunks, check))

    def decision_function(self, X):
        """Log-odds of the averaged probabilities.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        log_odds : ndarray of shape (n_samples,) or (n_samples, n_classes)
            For two classes, of the second one; otherwise of each class against the rest.
        """
        logits = []
        for mean, variance in self._logits(X):
            for_it, against = (average_probability(m, variance) for m in (mean, -mean))
            logits.append(np.log(np.maximum(for_it, TINY)) - np.log(np.maximum(against, TINY)))
        return logits[0] if len(logits) == 1 else np.stack(logits, axis=1)

    def predict_proba(self, X):
        """Probabilities, averaged over the posterior of the weights.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        probabilities : ndarray of shape (n_samples, n_classes)
            For more than two classes, those of each class against the rest, normalised.
        """
        averages = [average_probability(mean, variance) for mean, variance in self._logits(X)]
        if len(averages) == 1:
            return np.stack([1 - averages[0], averages[0]], axis=1)
        probabilities = np.stack(averages, axis=1)
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def predict(self, X):
        """Most probable classes.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        classes : ndarray of shape (n_samples,)
        """
        log_odds = self.decision_function(X)
        if log_odds.ndim == 1:
            return self.classes_[(log_odds > 0).astype(int)]
        return self.classes_[log_odds.argmax(axis=1)]

    def _logits(self, X) -> list[tuple[Array, Array]]:
        check_is_fitted(self)
        dtypes = [np.float64, np.float32]
        X = validate_data(self, X, accept_sparse="csr", dtype=dtypes, reset=False)
        features = Features(X, self._scaling)
        return [
            (
                features.product(posterior.features, posterior.mean) + posterior.intercept,
                posterior.logit_variance(features),
            )
            for posterior in self._posteriors
        ]

    def _validated(self, X, y, sample_weight, *, reset: bool):
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            dtype=[np.float64, np.float32],
            reset=reset,
        )
        check_classification_targets(y)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(
                sample_weight, X, dtype=np.float64, ensure_non_negative=True
            )
        return X, y, sample_weight

    def _fit(self, rows: Rows):
        overview = rows.reduce(Overview.of)
        if not np.isfinite(overview.square).all():
            raise ValueError("Input X contains NaN, infinity or a value too large for float64")
        if overview.count <= 0:
            raise ValueError("sample_weight must not be zero for every row.")
        self.classes_ = np.array(sorted(overview.class_weight))
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs at least two classes, got one class: "
                f"{self.classes_[0]}."
            )
        self._scaling, varying = self._scaling_of(overview)
        labels = self.classes_[1:] if len(self.classes_) == 2 else self.classes_
        results = [
            self._fit_one(
                _Problem(rows, label, self._scaling, self._start_intercept(overview, label))
            )
            for label in labels.tolist()
        ]
        posteriors, bounds, iterations, converged = zip(*results, strict=True)
        self._set_results(posteriors, bounds, iterations, converged, varying)
        return self

    def _start_intercept(self, overview: Overview, label: Any) -> float:
        if not self.fit_intercept:
            return 0.0
        share = np.clip(overview.class_weight[label] / overview.count, 1e-9, 1 - 1e-9)
        return float(np.log(share) - np.log1p(-share))

    def _scaling_of(self, overview: Overview) -> tuple[Scaling, Array]:
        square, mean = overview.square, overview.mean
        if not self.fit_intercept:
            square, mean = square + overview.count * mean**2, np.zeros_like(mean)
        varying = square > overview.count * (ROUNDING * overview.mean) ** 2
        # Constant features become zero, and no feature leaves zero without a slope.
        scale = np.where(varying, np.sqrt(square / overview.count), np.inf)
        return Scaling(mean, scale), varying

    def _set_results(self, posteriors, bounds, iterations, converged, varying) -> None:
        if not all(converged):
            warnings.warn(
                f"{type(self).__name__} did not converge in max_iter={self.max_iter} iterations; "
                "raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=4,
            )
        shape = (len(posteriors), len(varying))
        self.coef_, self.log_alpha_ = np.zeros(shape), np.full(shape, np.inf)
        self._posteriors = [self._keep(p, row) for row, p in enumerate(posteriors)]
        for row, posterior in enumerate(self._posteriors):
            scale = self._scaling.scale[posterior.features]
            self.coef_[row, posterior.features] = posterior.mean / scale
        intercepts = np.array([posterior.intercept for posterior in self._posteriors])
        self.intercept_ = intercepts - self.coef_ @ self._scaling.mean
        self.relevance_ = (self.coef_ != 0).any(axis=0)
        paths = [np.array(bound) for bound in bounds]
        self.elbo_ = paths[0] if len(paths) == 1 else paths
        self.n_iter_ = np.array(iterations)

    def _integral(self) -> Integral:
        if self.integration == "quadrature":
            return Integral()
        seed = int(check_random_state(self.random_state).randint(2**31))
        return Integral(self.n_draws, seed)

    @abstractmethod
    def _fit_one(self, problem: _Problem) -> tuple[Posterior, list[float], int, bool]:
        """The posterior, the path of the bound, iterations, and whether they were enough."""

    @abstractmethod
    def _keep(self, posterior: Any, row: int) -> Any:
        """Note what a posterior says about the features, and drop those that are irrelevant."""

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class VariationalDropoutClassifier(_SparseClassifier):
    """Logistic regression by variational dropout: finds the relevant features by itself.

    Every weight has a posterior N(w, α w²) and a log-uniform prior; w and α maximise the evidence
    lower bound, with the exact KL divergence. A feature is relevant where log α is below a
    threshold; the weights of all others are exactly zero. Their units do not matter. More than two
    classes are fitted one against the rest.

    Parameters
    ----------
    threshold : float, default=3.0
        Features with log α below it are relevant.
    integration : {"quadrature", "sampling"}, default="quadrature"
        How the expected log-likelihood of a row, a one-dimensional integral, is computed: exactly
        up to rounding by Gauss–Hermite quadrature, or by averaging over draws.
    n_draws : int, default=100
        Draws for each row, with `integration="sampling"`.
    fit_intercept : bool, default=True
        Whether to centre features and fit an intercept, which has no prior.
    max_iter : int, default=300
        Iterations, at most.
    tol : float, default=1e-6
        The fit ends when an iteration gains less, in nats.
    random_state : int, RandomState instance or None, default=None
        Of the draws.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Classes.
    coef_ : ndarray of shape (1, n_features) or (n_classes, n_features)
        Means of the weights; 0 for irrelevant features.
    intercept_ : ndarray of shape (1,) or (n_classes,)
        Intercepts.
    log_alpha_ : ndarray of the shape of `coef_`
        log α; infinite where a weight is zero at the optimum.
    relevance_ : ndarray of shape (n_features,)
        Whether a feature is relevant to some class.
    elbo_ : ndarray of shape (n_iter_ + 1,), or list of them for each class
        The lower bound, from the empty model on; it never falls.
    n_iter_ : ndarray of shape (1,) or (n_classes,)
        Iterations.

    References
    ----------
    D. Molchanov and A. Ashuha, Variational dropout for deep neural networks and linear models,
    2016.

    Examples
    --------
    >>> import numpy as np
    >>> from zeromean.estimators import VariationalDropoutClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(500, 30))
    >>> y = 3 * X[:, 3] - 2 * X[:, 7] > rng.logistic(size=500)
    >>> model = VariationalDropoutClassifier().fit(X, y)
    >>> bool(model.relevance_[3] and model.relevance_[7])
    True
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **_SparseClassifier._parameter_constraints,
        "threshold": [Interval(Real, None, None, closed="neither")],
    }

    def __init__(
        self,
        *,
        threshold: float = 3.0,
        integration: str = "quadrature",
        n_draws: int = 100,
        fit_intercept: bool = True,
        max_iter: int = 300,
        tol: float = 1e-6,
        random_state: Any = None,
    ):
        self.threshold = threshold
        self.integration = integration
        self.n_draws = n_draws
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def _fit_one(self, problem: _Problem) -> tuple[Posterior, list[float], int, bool]:
        fit = fit_dropout_logistic(
            problem.rows,
            problem.label,
            problem.scaling,
            self._integral(),
            start_intercept=problem.start_intercept,
            fit_intercept=self.fit_intercept,
            max_iter=self.max_iter,
            tol=self.tol,
        )
        return fit.posterior, fit.bound, fit.num_iterations, fit.converged

    def _keep(self, posterior: DropoutPosterior, row: int) -> DropoutPosterior:
        log_alpha = 2 * np.log(posterior.std / np.abs(posterior.mean))
        self.log_alpha_[row, posterior.features] = log_alpha
        kept = log_alpha < self.threshold
        return DropoutPosterior(
            posterior.features[kept],
            posterior.mean[kept],
            posterior.std[kept],
            posterior.intercept,
        )


class RVMClassifier(_SparseClassifier):
    """Logistic regression by Gaussian-KL ARD: the relevance vector machine for classification.

    Every weight has a prior N(0, 1/α) of its own; the α and a normal posterior with full covariance
    maximise a lower bound of the evidence. A feature is relevant if the bound would fall by more
    than a threshold without it; only those are in the model. More than two classes are fitted one
    against the rest.

    Parameters
    ----------
    threshold : float or "auto", default="auto"
        Nats of log evidence that a feature has to add to be relevant: log prior odds against it.
        "auto" is log((n_features - n) / (n + 1)) for a feature beside n relevant ones, and not
        below 0: a uniform prior over the number of relevant features. 0 is the classical machine.
    integration : {"quadrature", "sampling"}, default="quadrature"
        How the expected log-likelihood of a row, a one-dimensional integral, is computed: exactly
        up to rounding by Gauss–Hermite quadrature, or by averaging over draws.
    n_draws : int, default=100
        Draws for each row, with `integration="sampling"`.
    fit_intercept : bool, default=True
        Whether to centre features and fit an intercept, which has no prior.
    max_iter : int, default=300
        Iterations, at most.
    tol : float, default=1e-6
        The fit ends when an iteration gains less, in nats.
    random_state : int, RandomState instance or None, default=None
        Of the draws.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Classes.
    coef_ : ndarray of shape (1, n_features) or (n_classes, n_features)
        Posterior means of the weights; 0 for irrelevant features.
    intercept_ : ndarray of shape (1,) or (n_classes,)
        Intercepts.
    log_alpha_ : ndarray of the shape of `coef_`
        log of the prior precisions of the weights; infinite for irrelevant features.
    relevance_ : ndarray of shape (n_features,)
        Whether a feature is relevant to some class.
    elbo_ : ndarray of shape (n_iter_ + 1,), or list of them for each class
        The lower bound less the thresholds of the relevant features; it never falls.
    n_iter_ : ndarray of shape (1,) or (n_classes,)
        Iterations.

    References
    ----------
    M. Tipping, Sparse Bayesian learning and the relevance vector machine, 2001. E. Challis and D.
    Barber, Gaussian Kullback-Leibler approximate inference, 2013.

    Examples
    --------
    >>> import numpy as np
    >>> from zeromean.estimators import RVMClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(500, 30))
    >>> y = 3 * X[:, 3] - 2 * X[:, 7] > rng.logistic(size=500)
    >>> np.flatnonzero(RVMClassifier().fit(X, y).relevance_)
    array([3, 7])
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **_SparseClassifier._parameter_constraints,
        "threshold": [StrOptions({"auto"}), Interval(Real, 0, None, closed="left")],
    }

    def __init__(
        self,
        *,
        threshold: float | str = "auto",
        integration: str = "quadrature",
        n_draws: int = 100,
        fit_intercept: bool = True,
        max_iter: int = 300,
        tol: float = 1e-6,
        random_state: Any = None,
    ):
        self.threshold = threshold
        self.integration = integration
        self.n_draws = n_draws
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def _fit_one(self, problem: _Problem) -> tuple[Posterior, list[float], int, bool]:
        fit = fit_evidence_logistic(
            problem.rows,
            problem.label,
            problem.scaling,
            self._integral(),
            start_intercept=problem.start_intercept,
            fit_intercept=self.fit_intercept,
            prices=prices_of(self.threshold, len(problem.scaling.mean)),
            max_iter=self.max_iter,
            tol=self.tol,
        )
        return fit.posterior, fit.bound, fit.num_iterations, fit.converged

    def _keep(self, posterior: EvidencePosterior, row: int) -> EvidencePosterior:
        scale = self._scaling.scale[posterior.features]
        self.log_alpha_[row, posterior.features] = np.log(posterior.prior_precision * scale**2)
        return posterior
