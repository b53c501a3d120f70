"""Radial basis functions, which make a relevance vector machine of a sparse linear model."""

from __future__ import annotations

from numbers import Real
from typing import Any, ClassVar

import numpy as np
from scipy.sparse import issparse
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
    _fit_context,
)
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data


class RBFBasis(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """One radial basis function exp(-γ |x - c|²) at each row that it was fitted to.

    In front of `RVMRegressor` or `RVMClassifier` this is the classical relevance vector machine:
    the features that the model keeps are its relevance vectors.

    Parameters
    ----------
    gamma : float or "scale", default="scale"
        γ; "scale" is 1 / (n_features · variance of X), as in scikit-learn's support vector
        machines.

    Attributes
    ----------
    centres_ : ndarray or sparse matrix of shape (n_samples, n_features)
        The centres c.
    gamma_ : float
        γ.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.pipeline import make_pipeline
    >>> from zeromean.estimators import RBFBasis, RVMRegressor
    >>> X = np.linspace(-10, 10, 100)[:, None]
    >>> y = np.sinc(X[:, 0] / np.pi) + 0.1 * np.random.default_rng(0).normal(size=100)
    >>> machine = make_pipeline(RBFBasis(gamma=0.1), RVMRegressor()).fit(X, y)
    >>> bool(machine[-1].relevance_.sum() < 10)
    True
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "gamma": [StrOptions({"scale"}), Interval(Real, 0, None, closed="neither")],
    }

    def __init__(self, *, gamma: float | str = "scale"):
        self.gamma = gamma

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y=None):
        """Put a basis function at each row.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Rows.
        y : None
            Ignored.

        Returns
        -------
        self : object
        """
        values: Any = validate_data(self, X, accept_sparse="csr", dtype=np.float64, copy=True)
        self.centres_, self.gamma_ = values, self.gamma
        sparse = issparse(values)
        if self.gamma == "scale":
            with np.errstate(over="ignore"):
                square = (values.power(2) if sparse else np.square(values)).mean()
            if not np.isfinite(square):
                raise ValueError("Squares of X are too large for float64; rescale them.")
            variance = square - values.mean() ** 2 if sparse else values.var()
            # Rounding leaves a constant some variance; less where deviations are squared.
            varies = variance > (1e-14 if sparse else 1e-28) * square
            self.gamma_ = 1 / (values.shape[1] * variance) if varies else 1.0
        # The kernel multiplies distances out, which would cancel far from zero.
        self._origin = np.zeros(values.shape[1]) if sparse else values.mean(axis=0)
        self._n_features_out = self.centres_.shape[0]
        return self

    def transform(self, X):
        """Values of the basis functions.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        values : ndarray of shape (n_samples, n_centres)
        """
        check_is_fitted(self)
        rows: Any = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        centres = self.centres_
        if not (issparse(rows) or issparse(centres)):
            rows, centres = rows - self._origin, centres - self._origin
        return rbf_kernel(rows, centres, gamma=self.gamma_)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
