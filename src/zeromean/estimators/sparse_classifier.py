"""What the two classifiers share: one class against the rest, and predictions."""

from __future__ import annotations

from abc import abstractmethod
from numbers import Integral as IntegralNumber
from typing import Any, ClassVar

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data

from zeromean.estimators.array_types import Array
from zeromean.estimators.ascent import Ascent
from zeromean.estimators.likelihoods.log_sigmoid import Integral, average_probability
from zeromean.estimators.likelihoods.logistic import DataTerm
from zeromean.estimators.likelihoods.quadratic import varying
from zeromean.estimators.rows.class_moments import Overview
from zeromean.estimators.rows.columns import Features, Scaling
from zeromean.estimators.rows.scaled import made_ready
from zeromean.estimators.rows.sources import Rows, slices_of
from zeromean.estimators.sparse_linear_model import DTYPES, SparseLinearModel

# Probabilities of separable classes can underflow.
TINY = float(np.finfo(np.float64).tiny)


class SparseClassifier(ClassifierMixin, SparseLinearModel):
    """What the two classifiers share."""

    integration: str
    n_draws: int
    random_state: Any

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **SparseLinearModel._parameter_constraints,
        "integration": [StrOptions({"quadrature", "sampling"})],
        "n_draws": [Interval(IntegralNumber, 2, None, closed="left")],
        "random_state": ["random_state"],
    }

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
        logits = self._logits(X)
        if len(logits) == 1:
            # Both sides by themselves: 1 - p has no digits left where p is nearly 1.
            mean, variance = logits[0]
            logits = [(-mean, variance), (mean, variance)]
        averages = [average_probability(mean, variance) for mean, variance in logits]
        probabilities = np.maximum(np.stack(averages, axis=1), TINY)
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def predict_log_proba(self, X):
        """Logarithms of probabilities.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        log_probabilities : ndarray of shape (n_samples, n_classes)
        """
        return np.log(self.predict_proba(X))

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

    def _logits(self, X) -> Array:
        """Means and variances for each class, `(classes, 2, rows)`."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=DTYPES, reset=False)

        def logits_of(features: Features) -> Array:
            means = (features.product(p.features, p.mean) + p.intercept for p in self._posteriors)
            variances = (posterior.logit_variance(features) for posterior in self._posteriors)
            return np.stack([np.stack(pair) for pair in zip(means, variances, strict=True)])

        parts = [logits_of(Features(X[rows], self._scaling)) for rows in slices_of(X)]
        return np.concatenate(parts, axis=-1)

    def _fit(self, rows: Rows):
        with np.errstate(over="ignore"):
            overview = rows.reduce(Overview.of)
        if not np.isfinite(overview.square).all():
            raise ValueError("Squares of X are too large for float64; rescale them.")
        if overview.count <= 0:
            raise ValueError("sample_weight must not be zero for every row.")
        if len(overview.classes) < 2:
            raise ValueError(
                f"{type(self).__name__} needs at least two classes, got one class: "
                f"{overview.classes[0]}."
            )
        self.classes_ = overview.classes
        self._scaling = self._scaling_of(overview)
        rows = made_ready(rows, self._scaling)
        integral = self._integral()
        first = 1 if len(self.classes_) == 2 else 0
        self._set_results(
            [
                self._solve(self._data_term(rows, overview, integral, row))
                for row in range(first, len(self.classes_))
            ]
        )
        return self

    def _scaling_of(self, overview: Overview) -> Scaling:
        count, square, mean = overview.count, overview.square, overview.mean
        if not self.fit_intercept:
            square, mean = square + count * mean**2, np.zeros_like(mean)
        # Constant features become zero, and no feature leaves zero without a slope.
        varies = varying(square, overview.mean, count)
        return Scaling(mean, np.where(varies, np.sqrt(square / count), np.inf))

    def _data_term(self, rows: Rows, overview: Overview, integral: Integral, row: int) -> DataTerm:
        share = np.clip(overview.class_count[row] / overview.count, 1e-9, 1 - 1e-9)
        intercept = float(np.log(share) - np.log1p(-share)) if self.fit_intercept else 0.0
        return DataTerm(
            rows,
            overview.count,
            overview.classes[row],
            self._scaling,
            integral,
            self.fit_intercept,
            intercept,
        )

    def _integral(self) -> Integral:
        if self.integration == "quadrature":
            return Integral()
        return Integral(self.n_draws, int(check_random_state(self.random_state).randint(2**31)))

    def _set_results(self, ascents: list[Ascent[Any]]) -> None:
        self._warn_unless(all(ascent.converged for ascent in ascents))
        shape = (len(ascents), len(self._scaling.mean))
        self.coef_, self.log_alpha_ = np.zeros(shape), np.full(shape, np.inf)
        self._posteriors = []
        for row, ascent in enumerate(ascents):
            posterior, log_alpha = self._relevant_part(ascent.posterior)
            self.log_alpha_[row, ascent.posterior.features] = log_alpha
            scale = self._scaling.scale[posterior.features]
            self.coef_[row, posterior.features] = posterior.mean / scale
            self._posteriors.append(posterior)
        intercepts = np.array([posterior.intercept for posterior in self._posteriors])
        self.intercept_ = intercepts - self.coef_ @ self._scaling.mean
        self.relevance_ = (self.coef_ != 0).any(axis=0)
        paths = [np.array(ascent.bound) for ascent in ascents]
        self.elbo_ = paths[0] if len(paths) == 1 else paths
        self.n_iter_ = np.array([ascent.num_iterations for ascent in ascents])

    @abstractmethod
    def _solve(self, term: DataTerm) -> Ascent[Any]:
        """Find the posterior of the weights for one class against the rest."""

    @abstractmethod
    def _relevant_part(self, posterior: Any) -> tuple[Any, Array]:
        """The posterior of relevant features alone, and log α of all its features."""
