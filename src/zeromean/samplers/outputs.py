"""Samplers that draw outputs: what op(x, W) is, without drawing W."""

from __future__ import annotations

import torch
from torch import Tensor

from zeromean.distributions.noise import normal
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.functional.numerics import safe_sqrt
from zeromean.registry import register
from zeromean.samplers import fused
from zeromean.samplers.by_example import draw_by_example
from zeromean.samplers.kinds import Draws, draws
from zeromean.samplers.linear_maps import LinearMap


@register("sampler")
@draws(Draws.OUTPUTS, needs_normal_noise=True)
def local(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None) -> Tensor:
    """Local reparameterization: draw the outputs, op(x, μ) + ε · sqrt(op(x², σ²)).

    Every output has noise of its own, which lowers the variance of the gradient. For normal noise
    the distribution of each output is exact; the *correlation* between outputs that share weights
    is dropped: between the positions of a convolution, between the steps of a sequence through
    Linear, between repeated tokens of an Embedding. There it is an approximation (one that trains
    better than exact weight sampling) and not the same distribution as `weight`. Weights that
    depend on each other have outputs that do too: all of an example are drawn together, exactly.
    Kingma et al. (2015); Neklyudov et al. (2019), equations 39 to 42.
    """
    return _draw_locally(op, x, posterior, bias)


@register("sampler")
@draws(Draws.OUTPUTS)
def moment_matched(
    op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None
) -> Tensor:
    """Fast dropout: normal outputs with the mean and the variance that the noise would give.

    A sum of many independent terms is nearly normal whatever its terms, so Bernoulli and uniform
    variance layers can be trained like Gaussian ones. For normal noise this is `local`, and it
    drops the same correlations. Wang & Manning (2013).
    """
    return _draw_locally(op, x, posterior, bias)


def _draw_locally(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None) -> Tensor:
    if not isinstance(posterior, FactorizedPosterior):
        return draw_by_example(op, x, posterior, bias)
    if fused.can_fuse(op, x):
        return fused.draw_local(op, x, posterior, bias)
    return plain_local(op, x, posterior, bias)


def plain_local(
    op: LinearMap, x: Tensor, posterior: FactorizedPosterior, bias: Tensor | None = None
) -> Tensor:
    """`local` in plain operations: the reference of the fused version."""
    output_mean, output_variance = op.moments(x, posterior, bias)
    if torch.is_grad_enabled():
        std = safe_sqrt(output_variance)
    else:
        std = output_variance.clamp_min_(0).sqrt_()
    if op.computes_in_float16(posterior):
        std = std.half()
    like = std
    if output_mean is not None and output_mean.shape == std.shape:
        # In the layout of the mean, as the fused version draws it: the variance may have another.
        like = output_mean.to(std.dtype)
    noise = normal(like)
    output = noise * std if output_mean is None else torch.addcmul(output_mean, noise, std)
    if torch.is_grad_enabled() or op.better_format(x, posterior.shape) is None:
        return output
    return output.contiguous()  # In the usual format: that of the moments was chosen for speed.
