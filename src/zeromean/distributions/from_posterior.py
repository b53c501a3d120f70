"""A prior that is an earlier posterior of the same weight, for learning over time.

What was known stands in buffers of the posterior, so that files, copies, devices and ties have it:
`prior_mean` and `prior_log_variance`, or `prior_factor` where weights depend on each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zeromean import functional
from zeromean.distributions.noise import normal
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.full_covariance import FullCovariance
from zeromean.distributions.posteriors.positive import PositivePosterior
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.functional.numerics import smallest_normal, wide
from zeromean.registry import register


@register("prior")
@dataclass(frozen=True)
class FromPosterior:
    """The posterior that a layer had when `zm.become_prior_` was called.

    Layers get it from there, and are not built with it.
    """

    def kl(self, posterior: Posterior) -> Tensor:
        if not is_remembered(posterior):
            raise ValueError(
                "FromPosterior compares with an earlier posterior, and this one has none; call "
                "zm.become_prior_(model)."
            )
        if isinstance(posterior, FullCovariance):
            return _joint_kl(posterior)
        if isinstance(posterior, PositivePosterior):
            return _positive_kl(posterior)
        assert isinstance(posterior, FactorizedPosterior)
        log_variance = posterior.masked(_log_variance(posterior))
        mean = posterior.mean_weight()
        per_weight = functional.normal_to_normal_kl(
            wide(torch.zeros_like(log_variance) if mean is None else mean),
            wide(log_variance),
            wide(posterior.masked(posterior.get_buffer("prior_mean"))),
            wide(posterior.masked(posterior.get_buffer("prior_log_variance"))),
        )
        return posterior.counted(per_weight).sum()


def is_remembered(posterior: Posterior) -> bool:
    """Whether a posterior has buffers of what it was."""
    return "prior_mean" in posterior._buffers


def why_not_a_prior(posterior: Posterior) -> str | None:
    """Why a posterior cannot become a prior; None where it can."""
    if posterior.noise is not normal and not isinstance(posterior, PositivePosterior):
        return f"its noise is {posterior.noise.__name__}, and the KL is that of normal noise"
    if not isinstance(posterior, (FactorizedPosterior, FullCovariance)):
        return f"{type(posterior).__name__} does not say how its weights depend on each other"
    return None


@torch.no_grad()
def remember_(posterior: Posterior, earlier: Posterior | None = None) -> None:
    """Keep what a posterior is now, or what another one is, as its prior.

    Pruned weights are kept as they would be without the mask, by which the KL leaves them out.
    """
    earlier = posterior if earlier is None else earlier
    mask, earlier.mask = earlier.mask, None
    try:
        mean = earlier.mean_weight()
        if isinstance(earlier, FullCovariance):
            spread = {"prior_factor": earlier.factor()}
        else:
            assert isinstance(earlier, FactorizedPosterior)
            spread = {"prior_log_variance": _log_variance(earlier)}
    finally:
        earlier.mask = mask
    mean = torch.zeros(posterior.shape) if mean is None else mean
    for name, value in {"prior_mean": mean, **spread}.items():
        posterior.register_buffer(
            name, value.detach().to(posterior.device, posterior.dtype, copy=True)
        )


def hand_over_(posterior: Posterior, new: Posterior) -> None:
    """Give a posterior that stands in for another one the prior of that one."""
    for name in ("prior_mean", "prior_log_variance"):
        if name in posterior._buffers:
            new.register_buffer(name, posterior.get_buffer(name))


def _log_variance(posterior: FactorizedPosterior) -> Tensor:
    """Of every weight, and not below what the layers take for zero."""
    log_variance = posterior.log_variance_per_weight()
    return log_variance.clamp_min(math.log(smallest_normal(log_variance.dtype)))


def _positive_kl(posterior: PositivePosterior) -> Tensor:
    """KL between Gamma distributions, of which exponential ones are a kind."""
    prior_log_mean = wide(posterior.masked(posterior.get_buffer("prior_mean"), value=1.0)).log()
    prior_log_variance = wide(posterior.masked(posterior.get_buffer("prior_log_variance")))
    per_weight = functional.gamma_kl(
        wide(posterior.masked(posterior.log_mean)),
        wide(posterior.masked(posterior.log_alpha_per_weight())),
        prior_log_mean,
        prior_log_variance - 2 * prior_log_mean,
    )
    return posterior.counted(per_weight).sum()


def _joint_kl(posterior: FullCovariance) -> Tensor:
    """KL between two normals over all weights of a layer, or over those that are not pruned."""
    factor = wide(posterior.factor())
    earlier = wide(posterior.get_buffer("prior_factor"))
    difference = wide(posterior.mean - posterior.get_buffer("prior_mean")).flatten()
    if posterior.mask is not None:
        kept = posterior.mask.flatten()
        factor, difference, earlier = factor[kept], difference[kept], earlier[kept]
        earlier = torch.linalg.cholesky(earlier @ earlier.mT)
    both = torch.cat([factor, difference.unsqueeze(1)], 1)
    squares = torch.linalg.solve_triangular(earlier, both, upper=False).square().sum()
    log_determinant = 2 * earlier.diagonal().log().sum() - wide(posterior.log_determinant())
    return 0.5 * (squares - len(difference) + log_determinant)
