"""Weights that are independent of each other: w = mean + scale · ε.

ε has zero mean and unit variance (with `zm.factorized` noise, weights of a row or a column share a
factor). State-dict keys are `scale` (ZeroMean), `mean` and `log_alpha` (Multiplicative), `mean` and
`log_variance` (Additive).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.distributions.posteriors.spread import Spread, flushed


class FactorizedPosterior(Posterior):
    """A posterior with independent weights, of which each has a mean and a scale.

    What is asked of weights one by one is for these alone: local reparameterization and flipout,
    log α, pruning by it, certificates, bit widths.

    Subclasses need not think of pruning: what they return of pruned weights is replaced here, by a
    mean and a scale of zero.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, pruned in _OF_PRUNED.items():
            if name in vars(cls):
                setattr(cls, name, _masked(vars(cls)[name], pruned))

    # What it must answer, next to `reset_parameters` and `set_weight_`.

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """The mean (None: exactly zero) and a signed standard deviation of every weight."""
        raise NotImplementedError

    def log_variance_per_weight(self) -> Tensor:
        """Logarithm of the variance of every weight, in its shape."""
        raise NotImplementedError

    def log_alpha_per_weight(self) -> Tensor:
        """log α = log(variance / mean²) of every weight, in its shape."""
        raise NotImplementedError

    def clip_log_alpha_(self, low: float, high: float) -> None:
        """Project log α into [low, high], in place, where it is learned."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how its log α is clipped; give it a method "
            "clip_log_alpha_(low, high)."
        )

    # What follows from it.

    def moments(self, rows: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Mean and variance of every weight; a mean of None is exactly zero.

        A variance too small for a normal floating-point number is exactly zero: training drives
        most scales of a variance layer there, and denormals make matrix products crawl.

        Args:
            rows: Indices along dimension 0. Only these rows are computed, in the shape
                `(*rows.shape, *shape[1:])`, so that an embedding does not touch its whole table.
        """
        mean, scale = self.mean_and_scale(rows)
        return mean, flushed(self.silenced(scale, rows)).square()

    def mean_and_spread(self) -> tuple[Tensor | None, Tensor, Spread]:
        """The mean, and a tensor from which the variances are computed: which, and how."""
        mean, scale = self.mean_and_scale()
        return mean, self.silenced(scale), Spread.SCALE

    def mean_weight(self, rows: Tensor | None = None) -> Tensor | None:
        """The mean of every weight alone; None: exactly zero."""
        return self.mean_and_scale(rows)[0] if self.has_mean else None

    def sample(self) -> Tensor:
        """Draw one weight tensor."""
        mean, scale = self.mean_and_scale()
        scale = self.silenced(scale)
        return _combined(mean, scale, self.noise(scale))

    def draw_noise(self) -> Tensor:
        """Draw ε for one weight tensor, for `forward`."""
        return self.noise(self.mean_and_scale()[1].detach())

    def forward(self, noise: Tensor) -> Tensor:
        """The weight, mean + scale · noise, that this noise gives.

        Args:
            noise: One ε for every weight, `(*shape)`, or several draws, `(*, *shape)`.
        """
        mean, scale = self.mean_and_scale()
        return _combined(mean, self.silenced(scale), noise)

    def deviation(self) -> Tensor:
        """Draw one weight tensor less its mean."""
        scale = self.silenced(self.mean_and_scale()[1])
        return scale * self.noise(scale)

    def log_determinant(self) -> Tensor:
        return self.counted(self.masked(self.log_variance_per_weight())).sum()


# What weights that have been pruned answer.
_OF_PRUNED = {
    "mean_and_scale": 0.0,
    "mean_weight": 0.0,
    "moments": 0.0,
    "log_variance_per_weight": -math.inf,
    "log_alpha_per_weight": math.inf,
}


def _masked(method: Callable[..., Any], pruned: float) -> Callable[..., Any]:
    """The method, whose values are replaced at the weights that have been pruned."""

    @wraps(method)
    def masked(self: Posterior, rows: Tensor | None = None) -> Any:
        values = method(self) if rows is None else method(self, rows)
        if self.mask is None:
            return values
        if isinstance(values, tuple):
            return tuple(None if v is None else self.masked(v, rows, pruned) for v in values)
        return None if values is None else self.masked(values, rows, pruned)

    return masked


def independent(posterior: Posterior, what: str) -> FactorizedPosterior:
    """The posterior, if its weights can be asked one by one, as something wants to."""
    if not isinstance(posterior, FactorizedPosterior):
        raise TypeError(
            f"{what} needs a posterior with independent weights, such as zm.Additive, got "
            f"{type(posterior).__name__}."
        )
    return posterior


def _combined(mean: Tensor | None, scale: Tensor, noise: Tensor) -> Tensor:
    return scale * noise if mean is None else torch.addcmul(mean, scale, noise)


def _log_magnitude(weight: Tensor) -> Tensor:
    # Finite at zero, in value and gradient: clamp_min passes no gradient below its bound.
    return weight.abs().clamp_min(torch.finfo(weight.dtype).tiny).log()
