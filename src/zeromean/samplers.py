"""How op(x, W) is drawn when W is random.

A sampler is a function `(op, x, posterior, bias) -> output`. All of them agree in the mean of
each output, and all but `mean` in its variance; they differ in what shares one draw:

| sampler | noise | drawn for | exact for |
| --- | --- | --- | --- |
| `local` | normal | every output, object and position | each output by itself |
| `moment_matched` | any | every output, object and position | two moments of each output |
| `weight` | any | every weight, once for the batch | everything |
| `flipout` | any | every weight, with random signs by object | each object by itself |
| `mean` | any | nothing | – |
| `auto` | any | weights where that is cheaper and no example can tell, else outputs | as `local` |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zeromean import fused
from zeromean.functional import safe_sqrt
from zeromean.linear_maps import LinearMap
from zeromean.noise import normal
from zeromean.posteriors import Posterior

Sampler = Callable[[LinearMap, Tensor, Posterior, Tensor | None], Tensor]


def local(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None) -> Tensor:
    """Local reparameterization: draw the outputs, op(x, μ) + ε · sqrt(op(x², σ²)).

    Every output has noise of its own, which lowers the variance of the gradient. For normal noise
    the distribution of each output is exact; the *correlation* between outputs that share weights
    is dropped: between the positions of a convolution, between the steps of a sequence through
    Linear, between repeated tokens of an Embedding. There it is an approximation (one that trains
    better than exact weight sampling) and not the same distribution as `weight`.
    Kingma et al. (2015); Neklyudov et al. (2019), equations 39 to 42.
    """
    return _draw_locally(op, x, posterior, bias)


def moment_matched(
    op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None
) -> Tensor:
    """Fast dropout: normal outputs with the mean and the variance that the noise would give.

    A sum of many independent terms is nearly normal whatever its terms, so Bernoulli and uniform
    variance layers can be trained like Gaussian ones. For normal noise this is `local`, and it
    drops the same correlations. Wang & Manning (2013).
    """
    return _draw_locally(op, x, posterior, bias)


def weight(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None) -> Tensor:
    """Draw one weight for the whole batch: exact, with a noisier gradient.

    A layer that is called twice draws twice, but for predictions (`zm.predict_proba` and others)
    and inside `zm.held_noise`.
    """
    return op(x, posterior.sample(), bias)


def flipout(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None) -> Tensor:
    """Draw one weight and flip its signs by object, which decorrelates the objects of a batch.

    Linear flips every row of its input (every step of a sequence too), a convolution every object
    and channel (its positions keep their correlation), Embedding every output.
    Wen et al. (2018).
    """
    flipped = op.flip(x, posterior.deviation())
    weight_mean = posterior.mean_weight()
    if weight_mean is not None:
        return op(x, weight_mean, bias) + flipped
    return flipped if bias is None else flipped + op.align_bias(bias).to(flipped.dtype)


def mean(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None) -> Tensor:
    """Propagate the means: the weight scaling rule. A zero-mean layer gives just its bias."""
    weight_mean = posterior.mean_weight()
    if weight_mean is None:
        weight_mean = torch.zeros(posterior.shape, dtype=posterior.dtype, device=posterior.device)
    return op(x, weight_mean, bias)


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


SAMPLERS: dict[str, Sampler] = {
    "local": local,
    "moment_matched": moment_matched,
    "weight": weight,
    "flipout": flipout,
    "mean": mean,
    "auto": auto,
}


def _draw_locally(op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None) -> Tensor:
    if fused.can_fuse(op, x):
        return fused.draw_local(op, x, posterior, bias)
    return plain_local(op, x, posterior, bias)


def plain_local(
    op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None
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
    return output.contiguous()  # As it would be, had the moments not been in a better format.
