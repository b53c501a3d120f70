"""Samplers that draw weights, or none: once for a batch, with signs by example, or their means."""

from __future__ import annotations

import torch
from torch import Tensor

from zeromean.distributions.posteriors.factorized import independent
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.registry import register
from zeromean.samplers.kinds import Draws, draws
from zeromean.samplers.linear_maps import LinearMap
from zeromean.samplers.outputs import moment_matched


@register("sampler")
@draws(Draws.WEIGHTS)
def weight(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None) -> Tensor:
    """Draw one weight for the whole batch: exact, with a noisier gradient.

    A layer that is called twice draws twice, but for predictions (`zm.predict_proba` and others)
    and inside `zm.held_noise`.
    """
    return op(x, posterior.sample(), bias)


@register("sampler")
@draws(Draws.FLIPPED_WEIGHTS)
def flipout(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None) -> Tensor:
    """Draw one weight and flip its signs by example, which decorrelates the examples of a batch.

    Linear flips every row of its input (every step of a sequence too), a convolution every example
    and channel (its positions keep their correlation), Embedding every output.
    Wen et al. (2018).
    """
    flipped = op.flip(x, independent(posterior, "Flipping signs").deviation())
    weight_mean = posterior.mean_weight()
    if weight_mean is not None:
        return op(x, weight_mean, bias) + flipped
    return flipped if bias is None else flipped + op.align_bias(bias).to(flipped.dtype)


@register("sampler")
@draws(Draws.NOTHING)
def mean(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None) -> Tensor:
    """Propagate the means: the weight scaling rule. A zero-mean layer gives just its bias."""
    weight_mean = posterior.mean_weight()
    if weight_mean is None:
        weight_mean = torch.zeros(posterior.shape, dtype=posterior.dtype, device=posterior.device)
    return op(x, weight_mean, bias)


@register("sampler")
@draws(Draws.CHEAPER)
def auto(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None) -> Tensor:
    """The cheaper of `weight` and `local`, where the predictions of each example stay the same.

    Random numbers are what costs. A dense layer on vectors draws weights where they are at most a
    quarter as many as the outputs of the batch; each example by itself is distributed as with
    `local`. Where outputs of one example share weights (convolutions, sequences), `weight` is
    another distribution than the `local` that the network was trained with, and costs accuracy;
    there `auto` is `local`. In `zm.sampling` and predictions, layers that were built with another
    sampler than `local` keep it. In training, the layers' own samplers are better.
    """
    if op.prefers_weights(x, posterior.shape):
        return weight(op, x, posterior, bias)
    return moment_matched(op, x, posterior, bias)
