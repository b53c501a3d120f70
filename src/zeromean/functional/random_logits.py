"""Softmax and sigmoid averaged over normal logits, without random numbers.

**Full covariance: points.** Logits are μ + Lε with L the Cholesky factor, classes of large variance
first. The average goes over a fixed set of Sobol points, mapped to normal ones and corrected to
have exactly zero mean and unit covariance. Where it is free to choose, the number of points
quadruples for the examples whose probabilities still move.

**Variances alone: an integral.** softmax(z)ₖ is the probability that zₖ + gₖ is the largest of
zⱼ + gⱼ with independent Gumbel noise g. So with F_σ(u) = E exp(−e^(−u + σε)), the distribution
function of a normal and a Gumbel variable together,

    E softmax(z)ₖ = ∫ F'(u − μₖ) ∏_{j≠k} F(u − μⱼ) du,

whose integrand is analytic: the trapezoid rule has six digits with about two nodes a nat, for any
number of classes. The largest of them has the mean E log Σ e^z + γ, which gives the entropy too.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from zeromean.arguments import require_integer, shown
from zeromean.functional.numerics import can_branch, smallest_normal

EULER_GAMMA = 0.5772156649015329
# Points for all examples, and those at most.
_FEWEST, _MOST = 256, 2**16
FIXED_POINTS = 1024
"""Where tracing or gradients want to know the number in advance."""
# Change by a fourfold number of points below which the next one would be of no use.
_SETTLED = 1e-3
# Examples whose probabilities vary so little that the first points are enough.
_CALM = 0.03
_ELEMENTS_AT_ONCE = 2**19
# In units of the standard deviation: 2e-8 of the mass is beyond.
_TAIL = 5.6
# So far below the largest logit a class has no probability at all.
_MASKED = 1e4
# Standard deviation for which nodes are laid where a trace cannot look at the numbers.
_LARGEST_TRACED = 8.0


class SoftmaxMoments(NamedTuple):
    """What a softmax of normal logits is like, along the last dimension."""

    mean: Tensor
    """Expected probabilities, `(*, classes)`."""
    variance: Tensor
    """Variances of the probabilities, `(*, classes)`: by the slope of the softmax, and rough, where
    the logits came with variances alone."""
    expected_entropy: Tensor
    """Expected entropy in nats, `(*)`."""
    log_normalizer: Tensor
    """E log Σ e^z, `(*)`."""


def expected_softmax(
    mean: Tensor,
    *,
    variance: Tensor | None = None,
    covariance: Tensor | None = None,
    num_points: int | None = None,
) -> SoftmaxMoments:
    """Moments of softmax(z) over the last dimension, z normal.

    Each probability is within 1e-3, for standard deviations of logits up to 6 and up to 1,000
    classes. Differentiable, with a fixed number of points.

    Args:
        mean: Means of the logits, `(*, classes)`.
        variance: Variances of independent logits, of the same shape.
        covariance: Or their covariances, `(*, classes, classes)`.
        num_points: Points for a covariance. Default: as many as it takes; 1,024 where gradients are
            wanted or the computation is traced.
    """
    if (variance is None) == (covariance is None):
        raise TypeError("expected_softmax needs either variance= or covariance= of the logits.")
    given, wanted = variance, mean.shape
    if covariance is not None:
        given, wanted = covariance, (*mean.shape, mean.shape[-1])
    assert given is not None
    if given.shape != torch.Size(wanted):
        raise ValueError(
            f"Logits of shape {tuple(mean.shape)} need a tensor of shape {tuple(wanted)}, got "
            f"{shown(given)}."
        )
    if num_points is not None:
        num_points = require_integer("num_points", num_points, at_least=2)
    batch = mean.shape[:-1]
    rows = mean.flatten(0, -2) if mean.dim() > 1 else mean.unsqueeze(0)
    # Masked classes have logits of −∞, whose products with 0 are nobody's numbers.
    rows = torch.maximum(rows, rows.detach().amax(1, keepdim=True) - _MASKED)
    if variance is not None:
        found = _by_integral(rows, variance.reshape(rows.shape))
    else:
        found = _by_points(rows, given.reshape(*rows.shape, rows.shape[-1]), num_points)
    return SoftmaxMoments(*(part.reshape((*batch, *part.shape[1:])) for part in found))


def expected_sigmoid(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of sigmoid(z), and the expected entropy of yes and no, for normal z."""
    std = _std(variance)
    nodes, weights = _normal_nodes(std.detach(), 1.4)
    logits = mean.unsqueeze(-1) + std.unsqueeze(-1) * nodes
    yes = logits.sigmoid()
    average = yes @ weights
    spread = (yes - average.unsqueeze(-1)).square() @ weights
    surprise = torch.nn.functional.softplus(logits) - yes * logits
    return average, spread, surprise @ weights


def _by_points(mean: Tensor, covariance: Tensor, num_points: int | None) -> SoftmaxMoments:
    order, factor = _factor(covariance)
    sorted_mean = mean.gather(1, order)
    undo = order.argsort(1)
    fixed = torch.is_grad_enabled() and (mean.requires_grad or covariance.requires_grad)
    if num_points is None and (fixed or not can_branch()):
        num_points = FIXED_POINTS
    if num_points is not None:
        found = _average(sorted_mean, factor, num_points)
    else:
        found = _until_settled(sorted_mean, factor)
    return found._replace(mean=found.mean.gather(1, undo), variance=found.variance.gather(1, undo))


def _until_settled(mean: Tensor, factor: Tensor) -> SoftmaxMoments:
    """More and more points, for the examples whose probabilities move."""
    number = _FEWEST
    found = _average(mean, factor, number)
    left = (found.variance.amax(1) > _CALM**2).nonzero().flatten()
    while len(left) and number < _MOST:
        number *= 4
        better = _average(mean[left], factor[left], number)
        moved = (better.mean - found.mean[left]).abs().amax(1) > _SETTLED
        for whole, part in zip(found, better, strict=True):
            whole[left] = part
        left = left[moved]
    return found


def _average(mean: Tensor, factor: Tensor, num_points: int) -> SoftmaxMoments:
    points = _points(mean.shape[1], num_points).to(mean)
    if not can_branch():
        return _average_of(mean, factor, points)
    rows = max(1, _ELEMENTS_AT_ONCE // (num_points * mean.shape[1]))
    parts = zip(mean.split(rows), factor.split(rows), strict=True)
    found = [_average_of(*part, points) for part in parts]
    if len(found) == 1:
        return found[0]
    return SoftmaxMoments(*map(torch.cat, zip(*found, strict=True)))


def _average_of(mean: Tensor, factor: Tensor, points: Tensor) -> SoftmaxMoments:
    """Averages over points, `(classes, points)`, which lie along the memory."""
    logits = torch.baddbmm(mean.unsqueeze(-1), factor, points.expand(mean.shape[0], -1, -1))
    largest = logits.amax(1, keepdim=True).detach()
    logits = logits - largest
    powers = logits.exp()
    inverse = 1 / powers.sum(1, keepdim=True)
    probabilities = powers * inverse
    average = probabilities.mean(-1)
    variance = probabilities.square().mean(-1) - average.square()
    normalizer = -inverse.log().squeeze(1).mean(-1)
    entropy = normalizer - (probabilities * logits).sum(1).mean(-1)
    normalizer = normalizer + largest.squeeze(1).mean(-1)
    return SoftmaxMoments(average, variance.clamp_min(0), entropy.clamp_min(0), normalizer)


def _factor(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The order of the classes, by variance, and the Cholesky factor in this order."""
    size = covariance.shape[-1]
    variances = covariance.diagonal(dim1=1, dim2=2)
    order = variances.detach().argsort(1, descending=True)
    rows = covariance.gather(1, order.unsqueeze(2).expand(-1, -1, size))
    ordered = rows.gather(2, order.unsqueeze(1).expand(-1, size, -1))
    # Covariances have lower rank where fewer random units than classes reach them.
    tiny = math.sqrt(smallest_normal(covariance.dtype))
    slack = variances.detach().mean(1) * 1e-5 + tiny
    ordered = ordered + torch.diag_embed(slack.unsqueeze(1).expand(-1, size))
    if torch.compiler.is_compiling():
        return order, _unrolled_cholesky(ordered)
    return order, torch.linalg.cholesky_ex(ordered).L


def _unrolled_cholesky(matrix: Tensor) -> Tensor:
    """Column by column, in operations that every format for graphs has."""
    columns = []
    for index in range(matrix.shape[-1]):
        column = matrix[:, :, index] / matrix[:, index, index].clamp_min(1e-30).sqrt().unsqueeze(1)
        below = torch.arange(matrix.shape[-1], device=matrix.device) >= index
        column = column * below.to(column)
        columns.append(column)
        matrix = matrix - column.unsqueeze(2) * column.unsqueeze(1)
    return torch.stack(columns, -1)


@lru_cache(maxsize=32)
def _points(size: int, number: int) -> Tensor:
    """Points, `(size, number)`, with zero mean and unit covariance."""
    with torch.no_grad(), torch.device("cpu"):
        uniform = torch.quasirandom.SobolEngine(size).draw(number, dtype=torch.float64)
        # Sobol points begin at 0; in the middle of their cells none is.
        normal = torch.special.ndtri((uniform + 0.5 / number) % 1)
        normal = normal - normal.mean(0)
        if number > size:
            factor = torch.linalg.cholesky(normal.T @ normal / number)
            normal = torch.linalg.solve_triangular(factor, normal.T, upper=False).T
    return normal.T.contiguous()


def _by_integral(mean: Tensor, variance: Tensor) -> SoftmaxMoments:
    std = _std(variance)
    centre = mean.detach().amax(1, keepdim=True)
    mean = mean - centre
    nodes, weights = _normal_nodes(std.detach(), 0.7)
    grid = _grid(mean.detach(), std.detach())
    step = grid[1] - grid[0]
    parts = [_on_grid(*part, nodes, weights, grid) for part in _row_by_row(mean, std, grid, nodes)]
    log_cdf, slope, weighted = (torch.cat(part) for part in zip(*parts, strict=True))
    # (rows, classes, grid); F' ∏ F over the others is F'/F · ∏ F.
    together = log_cdf.sum(1, keepdim=True)
    average = (slope * (together - log_cdf).exp()).sum(-1) * step
    total = average.sum(1, keepdim=True)
    logits = (weighted * (together - log_cdf).exp()).sum(-1) * step
    cdf = together.squeeze(1).exp()
    # ∫ u dF = u_last − ∫ F du, as F is 0 at the first node and 1 at the last.
    largest = grid[-1] - (cdf.sum(-1) - 0.5 * cdf[:, -1]) * step
    normalizer = largest - EULER_GAMMA
    entropy = (normalizer - logits.sum(1)).clamp_min(0)
    average = average / total
    return SoftmaxMoments(
        average, _bounded_variance(average, variance), entropy, normalizer + centre.squeeze(1)
    )


def _row_by_row(mean: Tensor, std: Tensor, grid: Tensor, nodes: Tensor):
    rows = len(mean)
    if can_branch():
        rows = max(1, _ELEMENTS_AT_ONCE // (mean.shape[1] * len(grid) * len(nodes)))
    return zip(mean.split(rows), std.split(rows), strict=True)


def _on_grid(
    mean: Tensor, std: Tensor, nodes: Tensor, weights: Tensor, grid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log F, F' and ∫ z dF' at every node of the grid, for every class."""
    logits = mean.unsqueeze(-1) + std.unsqueeze(-1) * nodes
    # e^(z − u), by class, node of the grid and node of the normal.
    powers = (logits.unsqueeze(2) - grid.view(-1, 1)).clamp_max(80.0).exp()
    below = (-powers).exp()
    density = powers * below
    cdf = (below @ weights).clamp_min(smallest_normal(mean.dtype))
    weighted = (density @ (weights * logits).unsqueeze(-1)).squeeze(-1)
    return cdf.log(), density @ weights, weighted


def _grid(mean: Tensor, std: Tensor) -> Tensor:
    """Nodes for the largest of all classes, two a nat."""
    step = 0.5
    if not can_branch():
        low, high = -_TAIL * _LARGEST_TRACED, _TAIL * _LARGEST_TRACED
    else:
        low = float((mean - _TAIL * std).amax(1).amin())
        high = float((mean + _TAIL * std).amax())
    low, high = low - 3.5, high + math.log(mean.shape[1]) + 15.0
    return (
        torch.arange(math.ceil((high - low) / step) + 1, device=mean.device).to(mean) * step + low
    )


def _normal_nodes(std: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a standard normal, for functions that vary on a scale of reach / std."""
    largest = _LARGEST_TRACED if not can_branch() else float(std.amax()) if std.numel() else 0.0
    step = min(0.9, reach / max(largest, 1e-6))
    count = math.ceil(_TAIL / step)
    nodes = torch.arange(-count, count + 1, device=std.device).to(std) * step
    weights = (nodes.square() * -0.5).exp()
    return nodes, weights / weights.sum()


def _bounded_variance(mean: Tensor, variance: Tensor) -> Tensor:
    """By the slope of the softmax, and never more than p(1 − p), which is that of a yes or no."""
    others = (mean.square() * variance).sum(1, keepdim=True)
    linear = mean.square() * (variance * (1 - 2 * mean) + others).clamp_min(0)
    bound = (mean * (1 - mean)).clamp_min(smallest_normal(mean.dtype))
    return linear * bound / (linear + bound)


def _std(variance: Tensor) -> Tensor:
    return variance.clamp_min(smallest_normal(variance.dtype)).sqrt()
