"""Sparse Bayesian linear regression: variational dropout and the relevance vector machine."""

from __future__ import annotations

from numbers import Real
from typing import Any, ClassVar

import numpy as np
from sklearn.utils._param_validation import Interval, StrOptions

from zeromean.estimators.dropout.search import minimize_dropout
from zeromean.estimators.evidence.feature_prior import prices_of
from zeromean.estimators.evidence.search import EvidenceSolution, search_evidence
from zeromean.estimators.likelihoods.noise_term import NoiseTerm
from zeromean.estimators.likelihoods.quadratic import LeastSquares
from zeromean.estimators.sparse_regressor import LOG_TWO_PI, Learned, SparseRegressor

# The smallest noise variance that is learned, in variances of the target: above rounding errors.
NOISE_FLOOR = 1e-8


class VariationalDropoutRegressor(SparseRegressor):
    """Linear regression by variational dropout: finds the relevant features by itself.

    Every weight has a posterior N(w, α w²) and a log-uniform prior; w, α and, if wanted, the noise
    precision maximise the evidence lower bound, with the exact KL divergence. A feature is relevant
    where log α is below a threshold; the weights of all others are exactly zero. The units of
    features do not matter.

    Parameters
    ----------
    noise_precision : float or {"evidence", "elbo"}, default="evidence"
        Precision (1 / variance) of the noise, if known. Otherwise learned: "elbo" maximises the
        lower bound over it too, which overestimates it where features are not much fewer than rows,
        and for more features than rows has no maximum; "evidence" takes the one that
        `RVMRegressor` finds, which does not have this flaw. What is learned is at most 1e8 over the
        variance of the target.
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
        The lower bound by iteration, from the best start; it never falls.
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
        **SparseRegressor._parameter_constraints,
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

    def _solve(self, problem: LeastSquares) -> Learned:
        given = isinstance(self.noise_precision, Real)
        machine = _search_evidence(
            self, problem, float(self.noise_precision) if given else None, "auto"
        )
        noise = _noise_term(problem, problem.count, fixed=self.noise_precision != "elbo")
        tau = float(np.sqrt(machine.noise_precision))
        # From nothing, and from what has evidence: features may be relevant only together.
        nothing = np.zeros(len(problem.features))
        evident = nothing.copy()
        evident[machine.features] = tau * machine.mean
        solutions = [
            minimize_dropout(
                problem.quadratic,
                noise,
                start,
                tau,
                max_iter=self.max_iter,
                tol=self.tol,
            )
            for start in (nothing, evident)
        ]
        solution = min(solutions, key=lambda each: each.objective[-1])
        log_alpha = np.log(solution.alpha)
        weights = solution.v / (solution.tau * problem.scale)
        relevant = np.flatnonzero(log_alpha < self.threshold)
        variance = np.exp(log_alpha[relevant]) * weights[relevant] ** 2
        return Learned(
            relevant,
            weights[relevant],
            np.diag(variance),
            log_alpha,
            solution.tau**2,
            float((1 / (1 + np.exp(log_alpha[relevant]))).sum()),
            -np.array(solution.objective) - 0.5 * problem.count * LOG_TWO_PI,
            solution.num_iterations,
            solution.converged and machine.converged,
        )


class RVMRegressor(SparseRegressor):
    """Linear regression by evidence maximisation: the relevance vector machine, or ARD.

    Every weight has a prior N(0, 1/α) of its own; the α and the noise precision maximise the
    evidence, which is what remains when the weights are integrated out. A feature is relevant if
    the evidence would fall by more than a threshold without it; only those are in the model.

    Parameters
    ----------
    noise_precision : float, default=None
        Precision (1 / variance) of the noise, if known; otherwise learned, at most 1e8 over the
        variance of the target.
    threshold : float or "auto", default="auto"
        Nats of log evidence that a feature has to add to be relevant: log prior odds against it.
        "auto" is log((n_features - n) / (n + 1)) for a feature given n relevant ones, and not
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
        The log evidence less the thresholds of the relevant features, by iteration, from the best
        start; it never falls.
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
        **SparseRegressor._parameter_constraints,
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

    def _solve(self, problem: LeastSquares) -> Learned:
        solution = _search_evidence(self, problem, self.noise_precision, self.threshold)
        order = np.argsort(solution.features)
        relevant, precision = solution.features[order], solution.noise_precision
        count = problem.count if self.noise_precision else _num_contrasts(self, problem)
        scale = problem.scale[relevant]
        covariance = solution.covariance[np.ix_(order, order)] / np.outer(scale, scale)
        log_alpha = np.full(len(problem.features), np.inf)
        log_alpha[relevant] = np.log(solution.precision[order] * precision * scale**2)
        return Learned(
            relevant,
            solution.mean[order] / scale,
            covariance / precision,
            log_alpha,
            precision,
            float((1 - solution.precision * solution.covariance.diagonal()).sum()),
            np.array(solution.objective) - 0.5 * count * LOG_TWO_PI,
            solution.num_iterations,
            solution.converged,
        )


def _search_evidence(
    model: SparseRegressor,
    problem: LeastSquares,
    noise_precision: float | None,
    threshold: float | str,
) -> EvidenceSolution:
    noise = _noise_term(
        problem,
        _num_contrasts(model, problem) if noise_precision is None else problem.count,
        fixed=noise_precision is not None,
    )
    return search_evidence(
        problem.quadratic,
        noise,
        noise_precision or noise.count / noise.square,
        num_rows=problem.count - model.fit_intercept,
        prices=prices_of(threshold, len(problem.features)),
        max_iter=model.max_iter,
        tol=model.tol,
    )


def _num_contrasts(model: SparseRegressor, problem: LeastSquares) -> float:
    """Rows but for the one that the intercept takes; of hardly more, by weight, a half is left."""
    return max(problem.count - model.fit_intercept, 0.5 * problem.count)


def _noise_term(problem: LeastSquares, count: float, *, fixed: bool) -> NoiseTerm:
    # Without a floor, the noise precision of data that are exactly linear would be infinite.
    floor = 1.0 if fixed else 1 + NOISE_FLOOR
    return NoiseTerm(count, problem.target_square * floor, fixed)
