"""Outputs of a linear map whose bias is random too, whatever draws the weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeromean.distributions.noise import normal
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.samplers.fixed_noise import KeptNoise
from zeromean.samplers.kinds import Draws, drawn_by
from zeromean.samplers.linear_maps import LinearMap


def draw_with_bias(
    sampler: Any, op: LinearMap, x: Tensor, posterior: Posterior, bias: FactorizedPosterior
) -> Tensor:
    """op(x, W) + b, with a bias that is drawn as the sampler draws: for outputs, weights or not."""
    if isinstance(sampler, KeptNoise):
        return sampler.with_bias(op, sampler(op, x, posterior, None), x, bias)
    kind = drawn_by(sampler)
    if kind is Draws.CHEAPER:
        cheap = op.prefers_weights(x, posterior.shape)
        kind = Draws.WEIGHTS if cheap else Draws.OUTPUTS
    if kind is Draws.NOTHING:
        return sampler(op, x, posterior, bias.mean_weight())
    if kind is Draws.OUTPUTS:
        # Its variance adds to that of every output: one more normal number for each.
        mean, scale = bias.mean_and_scale()
        output = sampler(op, x, posterior, mean)
        return output + normal(output) * op.align_bias(scale).to(output.dtype)
    return sampler(op, x, posterior, bias.sample())
