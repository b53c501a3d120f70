"""Sparse Bayesian logistic regression: variational dropout and the relevance vector machine."""

from __future__ import annotations

import warnings
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from sklearn.utils._param_validation import Interval, StrOptions

from zeromean.estimators.array_types import Array
from zeromean.estimators.ascent import Ascent
from zeromean.estimators.dropout.logistic import search_dropout_logistic
from zeromean.estimators.dropout.posterior import DropoutPosterior
from zeromean.estimators.evidence.feature_prior import prices_of
from zeromean.estimators.evidence.logistic import EvidencePosterior, search_evidence_logistic
from zeromean.estimators.likelihoods.logistic import DataTerm
from zeromean.estimators.sparse_classifier import SparseClassifier


class VariationalDropoutClassifier(SparseClassifier):
    """Logistic regression by variational dropout: finds the relevant features by itself.

    Every weight has a posterior N(w, α w²) and a log-uniform prior; w and α maximise the evidence
    lower bound, with the exact KL divergence. A feature is relevant where log α is below a
    threshold; the weights of all others are exactly zero. The units of features do not matter. More
    than two classes are fitted one against the rest.

    With more features than rows it is overconfident, and warns: the prior does not bound the
    weights. `RVMClassifier` is usually better there.

    Parameters
    ----------
    threshold : float, default=3.0
        Features with log α below it are relevant.
    integration : {"quadrature", "sampling"}, default="quadrature"
        How the expected log-likelihood of a row, a one-dimensional integral, is computed: by
        quadrature, to about ten digits for any variance, or by averaging over draws.
    n_draws : int, default=100
        Draws for each row, with `integration="sampling"`.
    fit_intercept : bool, default=True
        Whether to centre features and fit an intercept, which has no prior.
    max_iter : int, default=300
        Iterations, at most.
    tol : float, default=1e-6
        The fit ends when an iteration gains less, in nats.
    random_state : int, RandomState instance or None, default=None
        Seed of the draws of integration="sampling".

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
        The lower bound by iteration, from the best start; it never falls.
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
        **SparseClassifier._parameter_constraints,
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

    def _solve(self, term: DataTerm) -> Ascent[DropoutPosterior]:
        ascent = search_dropout_logistic(term, max_iter=self.max_iter, tol=self.tol)
        # The prior does not bound the weights, so that chance separates, and is believed.
        if term.num_varying > term.count and term.smallest_margin(ascent.posterior) > 0:
            warnings.warn(
                f"VariationalDropoutClassifier separates all {term.count:g} rows by some of "
                f"{term.num_varying} features; with more features than rows its probabilities are "
                "overconfident. Try RVMClassifier, or calibrate them on other rows.",
                UserWarning,
                stacklevel=2,
            )
        return ascent

    def _relevant_part(self, posterior: DropoutPosterior) -> tuple[DropoutPosterior, Array]:
        log_alpha = posterior.log_alpha()
        return posterior.part(log_alpha < self.threshold), log_alpha


class RVMClassifier(SparseClassifier):
    """Logistic regression by Gaussian-KL ARD: the relevance vector machine for classification.

    Every weight has a prior N(0, 1/α) of its own; the α and a normal posterior with full covariance
    maximise a lower bound of the evidence. A feature is relevant if the bound would fall by more
    than a threshold without it; only those are in the model. More than two classes are fitted one
    against the rest.

    Parameters
    ----------
    threshold : float or "auto", default="auto"
        Nats of log evidence that a feature has to add to be relevant: log prior odds against it.
        "auto" is log((n_features - n) / (n + 1)) for a feature given n relevant ones, and not
        below 0: a uniform prior over the number of relevant features. 0 is the classical machine.
    integration : {"quadrature", "sampling"}, default="quadrature"
        How the expected log-likelihood of a row, a one-dimensional integral, is computed: by
        quadrature, to about ten digits for any variance, or by averaging over draws.
    n_draws : int, default=100
        Draws for each row, with `integration="sampling"`.
    fit_intercept : bool, default=True
        Whether to centre features and fit an intercept, which has no prior.
    max_iter : int, default=300
        Iterations, at most.
    tol : float, default=1e-3
        The fit ends when an iteration gains less, in nats.
    random_state : int, RandomState instance or None, default=None
        Seed of the draws of integration="sampling".

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
        The lower bound less the thresholds of the relevant features, by iteration, from the best
        start; it never falls.
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
        **SparseClassifier._parameter_constraints,
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
        tol: float = 1e-3,
        random_state: Any = None,
    ):
        self.threshold = threshold
        self.integration = integration
        self.n_draws = n_draws
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def _solve(self, term: DataTerm) -> Ascent[EvidencePosterior]:
        prices = prices_of(self.threshold, term.num_varying)
        return search_evidence_logistic(term, prices=prices, max_iter=self.max_iter, tol=self.tol)

    def _relevant_part(self, posterior: EvidencePosterior) -> tuple[EvidencePosterior, Array]:
        scale = self._scaling.scale[posterior.features]
        return posterior, np.log(posterior.prior_precision * scale**2)
