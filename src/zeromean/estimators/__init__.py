"""Sparse Bayesian linear models with the scikit-learn API.

`VariationalDropoutRegressor` and `VariationalDropoutClassifier` find the relevant features by
variational dropout, `RVMRegressor` and `RVMClassifier` by evidence; `RBFBasis` in front of one of
the latter makes the classical relevance vector machine.
"""

from zeromean.extras import how_to_install

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        how_to_install("The estimators need scikit-learn and scipy", "estimators")
    ) from error

from zeromean.estimators.classifiers import RVMClassifier, VariationalDropoutClassifier
from zeromean.estimators.rbf_basis import RBFBasis
from zeromean.estimators.regressors import RVMRegressor, VariationalDropoutRegressor

__all__ = [
    "RBFBasis",
    "RVMClassifier",
    "RVMRegressor",
    "VariationalDropoutClassifier",
    "VariationalDropoutRegressor",
]
