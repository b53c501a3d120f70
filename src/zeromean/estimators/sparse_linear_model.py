"""What regressors and classifiers share: where rows come from, and how they are checked."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, _fit_context, clone, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import Interval
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data

from zeromean.estimators.rows.sources import ArrayRows, ChunkRows, DaskRows, Rows, is_dask

DTYPES = [np.float64, np.float32]


class SparseLinearModel(BaseEstimator, ABC):
    """A linear model that sees its rows by chunks, wherever they are."""

    fit_intercept: bool
    max_iter: int
    tol: float

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "fit_intercept": ["boolean"],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="neither")],
    }

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y, sample_weight=None):
        """Fit the model.

        Parameters
        ----------
        X : array-like, sparse matrix or dask.array of shape (n_samples, n_features)
            Rows. A memory map of float64 or float32 is read in slices; a dask.array is reduced on
            its own scheduler.
        y : array-like of shape (n_samples,)
            Targets or classes.
        sample_weight : array-like of shape (n_samples,), default=None
            How many times each row counts.

        Returns
        -------
        self : object
        """
        if is_dask(X):
            return self._fit(self._dask_rows(X, y, sample_weight))
        return self._fit(ArrayRows(*self._checked(X, y, sample_weight, reset=True)))

    @_fit_context(prefer_skip_nested_validation=True)
    def fit_chunks(self, chunks: Iterable[tuple[Any, ...]] | Callable[[], Iterable]):
        """Fit the model to rows that never lie in memory together.

        Regression takes one pass over the chunks; classification takes several.

        Parameters
        ----------
        chunks : iterable, or function that returns one
            Of tuples (X, y) or (X, y, sample_weight). Chunks without rows are passed over.

        Returns
        -------
        self : object
        """
        first = True

        def check(X, y, sample_weight):
            nonlocal first
            checked = self._checked(X, y, sample_weight, reset=first)
            first = False
            return checked

        known = {name: vars(self).get(name) for name in ("n_features_in_", "feature_names_in_")}
        try:
            return self._fit(ChunkRows(chunks, check))
        except BaseException:
            # The model of an earlier fit stays as it was.
            for name, value in known.items():
                vars(self).pop(name, None) if value is None else setattr(self, name, value)
            raise

    @abstractmethod
    def _fit(self, rows: Rows): ...

    def _dask_rows(self, X: Any, y: Any, sample_weight: Any) -> DaskRows:
        if X.ndim != 2 or X.shape[1] == 0:
            raise ValueError(
                f"Expected a dask.array of shape (n_samples, n_features), got {X.shape}."
            )
        unfitted: Any = clone(self)
        unfitted.n_features_in_ = self.n_features_in_ = X.shape[1]
        vars(self).pop("feature_names_in_", None)
        # Blocks are checked where they are.
        return DaskRows(X, y, sample_weight, partial(unfitted._checked, reset=False))

    def _checked(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, Any, Any]:
        """Arrays, as scikit-learn wants them; of regressions, finiteness shows in the moments."""
        classes = is_classifier(self)
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            dtype=DTYPES,
            y_numeric=not classes,
            ensure_all_finite=classes,
            reset=reset,
        )
        if classes:
            check_classification_targets(y)
        else:
            y = np.asarray(y, dtype=np.float64)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(
                sample_weight, X, dtype=np.float64, ensure_non_negative=True
            )
        # Their squares are summed as they are; dense rows are made float64 by slices.
        X = sparse.csr_array(X, dtype=np.float64) if sparse.issparse(X) else X
        return X, y, sample_weight

    def _warn_unless(self, converged: bool) -> None:
        if not converged:
            warnings.warn(
                f"{type(self).__name__} did not converge in max_iter={self.max_iter} iterations; "
                "raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=2,
            )

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
