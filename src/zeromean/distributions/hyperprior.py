"""What is known of a prior's variance beforehand, and the weights that share one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from zeromean.arguments import require_numbers
from zeromean.distributions.posteriors.posterior import WeightLayout


@dataclass(frozen=True)
class InverseGamma:
    """A hyperprior of the variance of a normal prior: p(v) ∝ v^(−shape − 1) · e^(−scale / v).

    Its mode is scale / (shape + 1), and it weighs as much as 2 · shape + 2 weights do.

    Args:
        shape: How sure it is of its mode.
        scale: Of a variance, not of a standard deviation.
    """

    shape: float
    scale: float

    def __post_init__(self):
        require_numbers(shape=self.shape, scale=self.scale)
        for name, value in (("shape", self.shape), ("scale", self.scale)):
            if not 0 < value < math.inf:
                raise ValueError(f"InverseGamma needs a {name} > 0, got {value}.")

    def log_density(self, variance: Tensor) -> Tensor:
        """log p(v)."""
        constant = self.shape * math.log(self.scale) - math.lgamma(self.shape)
        return constant - (self.shape + 1) * variance.log() - self.scale / variance

    def best_variance(self, squares: Tensor, count: Tensor) -> Tensor:
        """The most probable v for so many weights with this sum of expected squares."""
        return (squares + 2 * self.scale) / (count + 2 * self.shape + 2)


def sum_by_share(per_weight: Tensor, per: str, layout: WeightLayout) -> Tensor:
    """Sums over the weights of a layer, of each neuron, or of each weight alone."""
    if per == "layer":
        return per_weight.sum()
    if per == "weight":
        return per_weight
    if layout.neuron_dim == 0:
        return per_weight.flatten(1).sum(1)
    blocks = per_weight.unflatten(0, (layout.groups, -1))  # (groups, rows, neurons, …)
    return blocks.sum(1).flatten(2).sum(2) if blocks.dim() > 3 else blocks.sum(1)
