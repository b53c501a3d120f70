"""The data term of logistic regression with normal weights: one-dimensional integrals over rows.

The log-odds of a row are normal with mean m = wᵀx + intercept and variance s², so that all there is
to compute is E log σ(±m + s y) with y ~ N(0, 1) and its derivatives: by quadrature, or by sampling
y. The quadrature is Gauss–Hermite up to s = 1; beyond, the poles of log σ come so close that the
trapezoidal rule, whose error falls exponentially in the number of nodes, needs fewer. Each row has
the number of nodes that its own s needs. The derivative in s² is half the one of second order in m
(Stein's identity).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy import sparse
from scipy.special import expit, log_expit, roots_hermitenorm

from zeromean.estimators.penalty import Array
from zeromean.estimators.quadratic import Indices

# Nodes up to these standard deviations of the log-odds: of Gauss–Hermite, and trapezoidal.
HERMITE_NODES = {0.5: 16, 1.0: 32}
TRAPEZOIDAL_NODES = {2.0: 64, 4.0: 112, 8.0: 216, 16.0: 432, 32.0: 864, np.inf: 1728}
BOUNDS = np.array([*HERMITE_NODES, *TRAPEZOIDAL_NODES])
# Beyond so many standard deviations, the normal density is below 1e-16.
TAIL = 8.5
ROWS_TIMES_NODES = 2**17


class LogSigmoid(NamedTuple):
    """E log σ(m + s y), its slope and negative curvature in m, and -2 times its slope in s²."""

    value: Array
    slope: Array
    curvature: Array
    spread: Array


def integrate(mean: Array, variance: Array) -> LogSigmoid:
    """By quadrature, to about 1e-10."""

    def kernel(logits: Array) -> tuple[Array, ...]:
        misses = expit(-logits)
        return log_expit(logits), misses, misses * (1 - misses)

    value, slope, curvature = _average(kernel, mean, variance)
    return LogSigmoid(value, slope, curvature, curvature)


def sample(mean: Array, variance: Array, num_samples: int, seed: int) -> LogSigmoid:
    """By averaging over samples, in pairs ±y; the same ones each time, so that it is a function."""
    noise = np.random.default_rng(seed).standard_normal((len(mean), (num_samples + 1) // 2))
    # The pairs make the slope in s² finite at s = 0.
    noise = np.concatenate([noise, -noise], axis=1)
    std = np.sqrt(np.maximum(variance, 1e-12))
    logits = mean[:, None] + std[:, None] * noise
    misses = expit(-logits)
    return LogSigmoid(
        log_expit(logits).mean(axis=1),
        misses.mean(axis=1),
        (misses * (1 - misses)).mean(axis=1),
        -(misses * noise).mean(axis=1) / std,
    )


def average_probability(mean: Array, variance: Array) -> Array:
    """E σ(m + s y)."""
    return _average(lambda logits: (expit(logits),), mean, variance)[0]


def _average(kernel: Callable[[Array], tuple[Array, ...]], mean: Array, variance: Array) -> Array:
    """Averages of functions of normal log-odds, stacked; each row has its own rule."""
    std = np.sqrt(variance)
    rule = np.searchsorted(BOUNDS, std)
    needed = np.unique(rule)
    if len(needed) == 1:
        return _average_by_rule(kernel, mean, std, int(needed[0]))
    parts = {which: np.flatnonzero(rule == which) for which in needed.tolist()}
    averages = {
        which: _average_by_rule(kernel, mean[rows], std[rows], which)
        for which, rows in parts.items()
    }
    result = np.empty((len(next(iter(averages.values()))), len(mean)))
    for which, rows in parts.items():
        result[:, rows] = averages[which]
    return result


def _average_by_rule(
    kernel: Callable[[Array], tuple[Array, ...]], mean: Array, std: Array, rule: int
) -> Array:
    nodes, weights = _nodes_and_weights(rule)
    # Few nodes are handled for many rows at once, many for few.
    size = max(1, ROWS_TIMES_NODES // len(nodes))
    parts = []
    for start in range(0, len(mean), size):
        part = slice(start, start + size)
        logits = mean[part, None] + std[part, None] * nodes
        parts.append([values @ weights for values in kernel(logits)])
    return np.concatenate([np.array(part) for part in parts], axis=1)


@lru_cache
def _nodes_and_weights(rule: int) -> tuple[Array, Array]:
    if rule < len(HERMITE_NODES):
        nodes, weights = roots_hermitenorm(list(HERMITE_NODES.values())[rule])
    else:
        count = list(TRAPEZOIDAL_NODES.values())[rule - len(HERMITE_NODES)]
        nodes = np.linspace(-TAIL, TAIL, count)
        weights = np.exp(-0.5 * nodes**2)
    return nodes, weights / weights.sum()


@dataclass(frozen=True)
class Integral:
    """How to integrate: by quadrature, or with that many samples."""

    num_samples: int | None = None
    seed: int = 0

    def __call__(self, mean: Array, variance: Array) -> LogSigmoid:
        if self.num_samples is None:
            return integrate(mean, variance)
        return sample(mean, variance, self.num_samples, self.seed)


@dataclass(frozen=True)
class Scaling:
    """What makes a feature one of mean 0 and variance 1."""

    mean: Array
    scale: Array


@dataclass(frozen=True)
class Sums:
    """Quantities that are summed over rows; chunks of rows add."""

    def __add__(self, other):
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Slopes(Sums):
    """The data term, its slopes in weights and intercept, and -2 × those in variances."""

    value: float
    slope: Array  # (features,)
    intercept_slope: float
    spread: Array  # (features,)


@dataclass(frozen=True)
class Curvatures(Sums):
    """The negative Hessian of the data term in some weights and the intercept."""

    block: Array  # (chosen, chosen)
    column: Array  # (chosen,)
    corner: float


@dataclass(frozen=True)
class JointCurvatures(Sums):
    """The Hessian of the data term in weights and intercept (last), and in variances."""

    means: Array  # (features + 1, features + 1)
    mixed: Array  # (features + 1, features)
    variances: Array  # (features, features)


class Posterior(Protocol):
    """A normal distribution of the weights of some features (in units of `Scaling`)."""

    @property
    def features(self) -> Indices: ...

    @property
    def mean(self) -> Array: ...

    @property
    def intercept(self) -> float: ...

    def logit_variance(self, features: Features) -> Array: ...


def slopes(
    X: Any,
    y: Array,
    weight: Array | None,
    label: Any,
    scaling: Scaling,
    posterior: Posterior,
    integral: Integral,
) -> Slopes:
    features = Features(X, scaling)
    sign, term = _term(features, y, label, posterior, integral)
    weight = np.ones(len(sign)) if weight is None else weight
    pull = weight * sign * term.slope
    return Slopes(
        float(weight @ term.value),
        features.project(pull),
        float(pull.sum()),
        features.project_squares(weight * term.spread),
    )


def curvatures(
    X: Any,
    y: Array,
    weight: Array | None,
    label: Any,
    scaling: Scaling,
    posterior: Posterior,
    integral: Integral,
    chosen: Indices,
) -> Curvatures:
    features = Features(X, scaling)
    _, term = _term(features, y, label, posterior, integral)
    curvature = term.curvature if weight is None else weight * term.curvature
    columns = features.columns(chosen)
    weighted = columns * np.sqrt(curvature)[:, None]
    return Curvatures(weighted.T @ weighted, curvature @ columns, float(curvature.sum()))


def joint_curvatures(
    X: Any, y: Array, weight: Array | None, label: Any, scaling: Scaling, posterior: Posterior
) -> JointCurvatures:
    features = Features(X, scaling)
    sign = np.where(np.asarray(y) == label, 1.0, -1.0)
    mean = features.product(posterior.features, posterior.mean) + posterior.intercept
    second, third, fourth = _higher_derivatives(sign * mean, posterior.logit_variance(features))
    weight = np.ones(len(sign)) if weight is None else weight
    columns = features.columns(posterior.features)
    squares = columns**2
    augmented = np.column_stack([columns, np.ones(len(sign))])
    return JointCurvatures(
        augmented.T @ (augmented * (weight * second)[:, None]),
        augmented.T @ (squares * (weight * sign * third / 2)[:, None]),
        squares.T @ (squares * (weight * fourth / 4)[:, None]),
    )


def _higher_derivatives(mean: Array, variance: Array) -> tuple[Array, Array, Array]:
    """Averages of the second, third and fourth derivative of log σ."""

    def kernel(logits: Array) -> tuple[Array, ...]:
        misses = expit(-logits)
        spread = misses * (1 - misses)
        return -spread, spread * (1 - 2 * misses), spread * (6 * spread - 1)

    second, third, fourth = _average(kernel, mean, variance)
    return second, third, fourth


def _term(
    features: Features, y: Array, label: Any, posterior: Posterior, integral: Integral
) -> tuple[Array, LogSigmoid]:
    sign = np.where(np.asarray(y) == label, 1.0, -1.0)
    mean = features.product(posterior.features, posterior.mean) + posterior.intercept
    return sign, integral(sign * mean, posterior.logit_variance(features))


class Features:
    """A chunk of rows in units of `Scaling`; a sparse one stays sparse."""

    def __init__(self, X: Any, scaling: Scaling):
        self.sparse = sparse.issparse(X)
        self.scaling = scaling
        if self.sparse:
            self.X = X.tocsr()
        else:
            X = np.asarray(X, dtype=np.float64)
            self.X = (X - scaling.mean) / scaling.scale

    def columns(self, chosen: Indices) -> Array:
        if not self.sparse:
            return self.X[:, chosen]
        mean, scale = self.scaling.mean[chosen], self.scaling.scale[chosen]
        return (self.X[:, chosen].toarray() - mean) / scale

    def product(self, chosen: Indices, weights: Array) -> Array:
        """Z[:, chosen] @ weights."""
        return self.columns(chosen) @ weights

    def project(self, pull: Array) -> Array:
        """Zᵀ pull."""
        if not self.sparse:
            return pull @ self.X
        return (self.X.T @ pull - self.scaling.mean * pull.sum()) / self.scaling.scale

    def project_squares(self, pull: Array) -> Array:
        """(Z²)ᵀ pull."""
        if not self.sparse:
            return pull @ self.X**2
        mean, scale = self.scaling.mean, self.scaling.scale
        squares = self.X.power(2).T @ pull - 2 * mean * (self.X.T @ pull) + mean**2 * pull.sum()
        return np.maximum(squares, 0) / scale**2
