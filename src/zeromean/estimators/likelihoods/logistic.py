"""The data term of logistic regression with normal weights, and its derivatives.

The log-odds of a row are normal with mean m = wᵀz + intercept and a variance s² that the posterior
of the weights gives; all there is to compute for a row is E log σ(±m + s y) (`log_sigmoid`). Every
derivative is a sum over rows, and so takes one pass over them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from zeromean.estimators.array_types import Array, Indices
from zeromean.estimators.likelihoods.log_sigmoid import Integral, LogSigmoid, higher_derivatives
from zeromean.estimators.likelihoods.quadratic import MatrixQuadratic, told_apart
from zeromean.estimators.rows.columns import Features, Scaling
from zeromean.estimators.rows.scaled import features_of
from zeromean.estimators.rows.sources import Chunk, Rows

# A matrix of more features would take too long to sum over rows.
MOST_SUMMED = 512


class WeightPosterior(Protocol):
    """A normal distribution of the weights of some features (in units of `Scaling`)."""

    @property
    def features(self) -> Indices: ...

    @property
    def mean(self) -> Array: ...

    @property
    def intercept(self) -> float: ...

    def logit_variance(self, features: Features) -> Array: ...


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


@dataclass(frozen=True)
class Margin:
    """Smallest of some rows; chunks of rows have the smaller one."""

    smallest: float

    def __add__(self, other: Margin) -> Margin:
        return self if self.smallest < other.smallest else other


@dataclass(frozen=True)
class DataTerm:
    """Σ weight · E log σ(±m + s y): one class against the rest."""

    rows: Rows
    count: float  # of rows, by weight
    label: Any
    scaling: Scaling
    integral: Integral
    fit_intercept: bool
    start_intercept: float

    @property
    def num_varying(self) -> int:
        return int(np.isfinite(self.scaling.scale).sum())

    def slopes(self, posterior: WeightPosterior) -> Slopes:
        return self.rows.reduce(_slopes, self.label, self.scaling, self.integral, posterior)

    def curvatures(self, posterior: WeightPosterior, chosen: Indices) -> Curvatures:
        return self.rows.reduce(
            _curvatures, self.label, self.scaling, self.integral, posterior, chosen
        )

    def smallest_margin(self, posterior: WeightPosterior) -> float:
        """The smallest log-odds of a row's own class, by the means of the weights."""
        return self.rows.reduce(_margin, self.label, self.scaling, posterior).smallest

    def joint_curvatures(self, posterior: WeightPosterior) -> JointCurvatures:
        """By quadrature, whatever `integral` says: a direction, not a value, comes of it."""
        return self.rows.reduce(_joint_curvatures, self.label, self.scaling, posterior)


@dataclass(frozen=True)
class QuadraticModel:
    """The data term about a posterior as a quadratic in some weights, the intercept following.

    In units of the square roots of `spread`, in which variances cost the same for all features.
    """

    chosen: Indices
    start: Array  # weights
    root: Array  # of the spread
    matrix: Array
    linear: Array
    centre: Array  # what the intercept belongs to: features about it do not move it
    _intercept: float
    _intercept_move: float

    @classmethod
    def about(
        cls, term: DataTerm, posterior: WeightPosterior, at: Slopes, chosen: Indices
    ) -> QuadraticModel | None:
        """About a posterior whose features are the first of those chosen.

        None where the data term is flat there: the posterior classifies all rows beyond doubt.
        """
        hessian = term.curvatures(posterior, chosen)
        if not (hessian.corner > 0 and (at.spread[chosen] > 0).all()):
            return None
        slope, block = at.slope[chosen], hessian.block
        centre, move = np.zeros(len(chosen)), 0.0
        if term.fit_intercept:
            centre, move = hessian.column / hessian.corner, at.intercept_slope / hessian.corner
            block = block - np.outer(centre, hessian.column)
            slope = slope - hessian.column * move
        start = np.concatenate([posterior.mean, np.zeros(len(chosen) - len(posterior.mean))])
        root = np.sqrt(at.spread[chosen])
        matrix = block / np.outer(root, root)
        return cls(
            chosen,
            start,
            root,
            matrix,
            matrix @ (start * root) + slope / root,
            centre,
            posterior.intercept,
            move,
        )

    @classmethod
    def of_all_features(cls, term: DataTerm, posterior: WeightPosterior) -> QuadraticModel | None:
        """About a posterior, unless features are too many: to be told apart, or for the time."""
        if term.num_varying > MOST_SUMMED or not told_apart(term.num_varying, term.count):
            return None
        at = term.slopes(posterior)
        others = at.spread > 0
        others[posterior.features] = False
        chosen = np.concatenate([posterior.features, np.flatnonzero(others)])
        return cls.about(term, posterior, at, chosen)

    @property
    def quadratic(self) -> MatrixQuadratic:
        return MatrixQuadratic(self.matrix, self.linear)

    def intercept(self, mean: Array) -> float:
        """The best intercept, given these weights."""
        return self._intercept + self._intercept_move - float(self.centre @ (mean - self.start))


def pulls(posterior: WeightPosterior, at: Slopes) -> Array:
    """Slopes of features outside the model in units of their standard errors; 0 for the others."""
    pull = np.zeros_like(at.slope)
    varying = at.spread > 0
    pull[varying] = np.abs(at.slope[varying]) / np.sqrt(at.spread[varying])
    pull[posterior.features] = 0
    return pull


def _slopes(
    chunk: Chunk, label: Any, scaling: Scaling, integral: Integral, posterior: WeightPosterior
) -> Slopes:
    features = features_of(chunk, scaling)
    sign, term = _term(chunk, features, label, integral, posterior)
    weight = chunk.weights()
    pull = weight * sign * term.slope
    return Slopes(
        float(weight @ term.value),
        features.project(pull),
        float(pull.sum()),
        features.project_squares(weight * term.spread),
    )


def _margin(chunk: Chunk, label: Any, scaling: Scaling, posterior: WeightPosterior) -> Margin:
    sign, mean, _ = _log_odds(chunk, features_of(chunk, scaling), label, posterior)
    return Margin(float(np.min((sign * mean)[chunk.weights() > 0], initial=np.inf)))


def _curvatures(
    chunk: Chunk,
    label: Any,
    scaling: Scaling,
    integral: Integral,
    posterior: WeightPosterior,
    chosen: Indices,
) -> Curvatures:
    features = features_of(chunk, scaling)
    _, term = _term(chunk, features, label, integral, posterior)
    curvature = chunk.weights() * term.curvature
    columns = features.columns(chosen)
    weighted = columns * np.sqrt(curvature)[:, None]
    return Curvatures(weighted.T @ weighted, curvature @ columns, float(curvature.sum()))


def _joint_curvatures(
    chunk: Chunk, label: Any, scaling: Scaling, posterior: WeightPosterior
) -> JointCurvatures:
    features = features_of(chunk, scaling)
    sign, mean, variance = _log_odds(chunk, features, label, posterior)
    second, third, fourth = higher_derivatives(sign * mean, variance)
    weight = chunk.weights()
    columns = features.columns(posterior.features)
    squares = columns**2
    augmented = np.column_stack([columns, np.ones(len(sign))])
    return JointCurvatures(
        augmented.T @ (augmented * (weight * second)[:, None]),
        augmented.T @ (squares * (weight * sign * third / 2)[:, None]),
        squares.T @ (squares * (weight * fourth / 4)[:, None]),
    )


def _term(
    chunk: Chunk, features: Features, label: Any, integral: Integral, posterior: WeightPosterior
) -> tuple[Array, LogSigmoid]:
    sign, mean, variance = _log_odds(chunk, features, label, posterior)
    return sign, integral(sign * mean, variance, chunk.number)


def _log_odds(
    chunk: Chunk, features: Features, label: Any, posterior: WeightPosterior
) -> tuple[Array, Array, Array]:
    sign = np.where(np.asarray(chunk.y) == label, 1.0, -1.0)
    mean = features.product(posterior.features, posterior.mean) + posterior.intercept
    return sign, mean, posterior.logit_variance(features)
