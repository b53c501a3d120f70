"""Integrals over normal log-odds: E log σ(m + s y) with y ~ N(0, 1), and its derivatives.

By quadrature, with nodes where they are needed, or by sampling y. For small s the nodes are in y:
Gauss–Hermite up to s = 1; beyond, the poles of log σ come so close that the trapezoidal rule, whose
error falls exponentially in the number of nodes, needs fewer. For large s the roles change: σ is
the distribution function of a logistic variable l, so that each of these functions is a step at 0,
or its integral or derivative, averaged over l. Averages of steps over y are known in closed form,
and Gauss's rule for the logistic density does the rest. The derivative in s² is half the one of
second order in m (Stein's identity).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.linalg import eigh_tridiagonal
from scipy.special import expit, log_expit, ndtr, roots_hermitenorm

from zeromean.estimators.array_types import Array

# Nodes up to these standard deviations of the log-odds: of Gauss–Hermite, and trapezoidal.
HERMITE_NODES = {0.5: 16, 1.0: 32}
TRAPEZOIDAL_NODES = {2.0: 64, 4.0: 112}
LOGISTIC_NODES = 24
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


@dataclass(frozen=True)
class Integral:
    """How to integrate: by quadrature, or with that many samples."""

    num_samples: int | None = None
    seed: int = 0

    def __call__(self, mean: Array, variance: Array, chunk: int) -> LogSigmoid:
        """The rows of a chunk, whose number goes into the seed of its samples."""
        if self.num_samples is None:
            return integrate(mean, variance)
        return sample(mean, variance, self.num_samples, [self.seed, chunk])


def integrate(mean: Array, variance: Array) -> LogSigmoid:
    """By quadrature, to about 1e-10."""

    def of_logits(logits: Array) -> tuple[Array, ...]:
        misses = expit(-logits)
        return log_expit(logits), misses, misses * (1 - misses)

    def of_steps(distance: Array, std: Array) -> tuple[Array, ...]:
        density, below = _density(distance / std), ndtr(distance / std)
        return -(std * density + distance * below), below, density / std

    value, slope, curvature = _average(of_logits, of_steps, mean, variance)
    return LogSigmoid(value, slope, curvature, curvature)


def sample(mean: Array, variance: Array, num_samples: int, seed: int | list[int]) -> LogSigmoid:
    """By averaging over samples, in pairs ±y; the same ones each time, so that it is a function."""
    rng = np.random.default_rng(seed)
    stds = np.sqrt(np.maximum(variance, 1e-12))
    averages = np.empty((4, len(mean)))
    size = max(1, ROWS_TIMES_NODES // num_samples)
    for start in range(0, len(mean), size):
        some = slice(start, start + size)
        m, std = mean[some, None], stds[some, None]
        noise = rng.standard_normal((len(m), (num_samples + 1) // 2))
        # The pairs make the slope in s² finite at s = 0.
        noise = np.concatenate([noise, -noise], axis=1)
        logits = m + std * noise
        misses = expit(-logits)
        values = log_expit(logits), misses, misses * (1 - misses), -misses * noise / std
        averages[:, some] = [value.mean(axis=1) for value in values]
    return LogSigmoid(*averages)


def higher_derivatives(mean: Array, variance: Array) -> tuple[Array, Array, Array]:
    """Derivatives of second, third and fourth order in m."""

    def of_logits(logits: Array) -> tuple[Array, ...]:
        misses = expit(-logits)
        spread = misses * (1 - misses)
        return -spread, spread * (1 - 2 * misses), spread * (6 * spread - 1)

    def of_steps(distance: Array, std: Array) -> tuple[Array, ...]:
        x = distance / std
        density = _density(x) / std
        return -density, -density * x / std, density * (1 - x**2) / std**2

    second, third, fourth = _average(of_logits, of_steps, mean, variance)
    return second, third, fourth


def average_probability(mean: Array, variance: Array) -> Array:
    """E σ(m + s y)."""
    (average,) = _average(
        lambda logits: (expit(logits),),
        lambda distance, std: (ndtr(-distance / std),),
        mean,
        variance,
    )
    return np.minimum(average, 1.0)  # Weights add up to 1 but for rounding.


Functions = tuple[Array, ...]


def _average(
    of_logits: Callable[[Array], Functions],
    of_steps: Callable[[Array, Array], Functions],
    mean: Array,
    variance: Array,
) -> Array:
    """Averages of functions of normal log-odds, stacked; each row has its own rule.

    Args:
        of_logits: The functions themselves.
        of_steps: Averages of the steps that they are made of, which lie at some distance from the
            mean of log-odds of some standard deviation.
    """
    std = np.sqrt(variance)
    rules = np.searchsorted(BOUNDS, std)

    def by(rule: int, mean: Array, std: Array) -> Array:
        nodes, weights = _nodes_and_weights(rule)
        # Few nodes are handled for many rows at once, many for few.
        size = max(1, ROWS_TIMES_NODES // len(nodes))
        parts = []
        for start in range(0, len(mean), size):
            m, s = mean[start : start + size, None], std[start : start + size, None]
            values = of_logits(m + s * nodes) if rule < len(BOUNDS) else of_steps(nodes - m, s)
            parts.append(np.array([each @ weights for each in values]))
        return np.concatenate(parts, axis=1)

    needed = np.unique(rules).tolist()
    if len(needed) == 1:
        return by(needed[0], mean, std)
    parts = {rule: np.flatnonzero(rules == rule) for rule in needed}
    averages = {rule: by(rule, mean[rows], std[rows]) for rule, rows in parts.items()}
    result = np.empty((len(averages[needed[0]]), len(mean)))
    for rule, rows in parts.items():
        result[:, rows] = averages[rule]
    return result


@lru_cache
def _nodes_and_weights(rule: int) -> tuple[Array, Array]:
    counts = [*HERMITE_NODES.values(), *TRAPEZOIDAL_NODES.values(), LOGISTIC_NODES]
    if rule < len(HERMITE_NODES):
        nodes, weights = roots_hermitenorm(counts[rule])
    elif rule < len(BOUNDS):
        nodes = np.linspace(-TAIL, TAIL, counts[rule])
        weights = np.exp(-0.5 * nodes**2)
    else:
        # The logistic density's orthogonal polynomials, by their recurrence (Golub & Welsch, 1969).
        order = np.arange(1, counts[rule])
        off_diagonal = np.pi * order**2 / np.sqrt(4 * order**2 - 1)
        nodes, vectors = eigh_tridiagonal(np.zeros(counts[rule]), off_diagonal)
        weights = vectors[0] ** 2
    return nodes, weights / weights.sum()


def _density(x: Array) -> Array:
    return np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi)
