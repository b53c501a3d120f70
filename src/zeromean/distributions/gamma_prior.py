"""The prior of positive weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeromean import functional
from zeromean.arguments import require_numbers
from zeromean.distributions.posteriors.positive import PositivePosterior
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.distributions.priors import num_random, sum_of
from zeromean.functional.numerics import wide
from zeromean.registry import register


@register("prior")
@dataclass(frozen=True)
class GammaPrior:
    """Gamma(concentration, scale), for positive weights; a concentration of 1 is exponential.

    Args:
        concentration: Below 1 most of it is near zero.
        scale: The mean, divided by the concentration.
        learn: Empirical Bayes: use the best common scale of each layer in place of `scale`, with
            which the prior's mean is the average of the posterior's.
    """

    concentration: float = 1.0
    scale: float = 1.0
    learn: bool = False

    positive: ClassVar[bool] = True

    def __post_init__(self):
        require_numbers(concentration=self.concentration, scale=self.scale)
        for name in ("concentration", "scale"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"GammaPrior needs a {name} > 0, got {value}.")

    def kl(self, posterior: Posterior) -> Tensor:
        if not isinstance(posterior, PositivePosterior):
            raise TypeError(
                "GammaPrior needs a posterior with positive weights, such as zm.Gamma, got "
                f"{type(posterior).__name__}; use zm.Normal()."
            )
        log_mean = wide(posterior.log_mean)
        prior_mean = torch.as_tensor(self.concentration * self.scale).to(log_mean)
        if self.learn:
            means = wide(posterior.mean_and_scale()[0])
            average = sum_of(posterior, means) / num_random(posterior)
            prior_mean = average.clamp_min(torch.finfo(average.dtype).tiny)
        log_alpha = posterior.masked(wide(posterior.log_alpha_per_weight()))
        prior_log_alpha = torch.full_like(log_mean, -math.log(self.concentration))
        kl = functional.gamma_kl(log_mean, log_alpha, prior_mean.log(), prior_log_alpha)
        return sum_of(posterior, kl)
