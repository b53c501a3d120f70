"""KL terms of the priors, as functions of tensors."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from zeromean.functional import _dawson
from zeromean.functional.numerics import _mean_over_std, _slope, _squared, can_branch

HALF_LOG_MOMENT = (0.5772156649015329 + math.log(2)) / 2
"""(γ + log 2) / 2 with Euler's γ: minus E log|ε| for standard normal ε."""


def log_uniform_kl(inverse_alpha: Tensor) -> Tensor:
    """Exact KL to the log-uniform prior, as a function of mean² / variance.

    It is 2 ∫₀ᶻ D(v) dv with Dawson's D and z² = inverse_alpha / 2 (Hron, Matthews & Ghahramani,
    2017), differentiable to any order, and 0 at 0.
    """
    if inverse_alpha.dtype not in _dawson.VALUE:
        return log_uniform_kl(inverse_alpha.float()).to(inverse_alpha.dtype)
    return _dawson.LogUniformKL.apply(inverse_alpha)[0]


def log_uniform_kl_sum(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Sum over weights of `log_uniform_kl(mean**2 / exp(log_variance))`, fused on CPU."""
    if _can_fuse(mean, log_variance):
        needs_gradient = torch.is_grad_enabled() and (
            mean.requires_grad or log_variance.requires_grad
        )
        total = _LogUniformKLSum.apply(mean, log_variance, needs_gradient)
        # Only an overflow (alpha below 1e-37 in float32) gets here without a finite sum.
        if math.isfinite(total.detach()):
            return total
    return log_uniform_kl(_squared(_mean_over_std(mean, log_variance)[0])).sum()


def log_uniform_kl_approx(log_alpha: Tensor) -> Tensor:
    """Sigmoid approximation of `log_uniform_kl` (Molchanov et al., 2017), within 0.0094 nat."""
    return 0.63576 * torch.sigmoid(-1.87320 - 1.48695 * log_alpha) + ard_kl(log_alpha)


def log_uniform_kl_sample(mean: Tensor | None, log_variance: Tensor, noise: Tensor) -> Tensor:
    """One-sample estimate of `log_uniform_kl` at the weight mean + std * noise."""
    # In units of the standard deviation, log|weight| - log std needs no subtraction.
    ratio = noise if mean is None else _mean_over_std(mean, log_variance)[0] + noise
    smallest = torch.finfo(ratio.dtype).tiny ** 0.5
    return ratio.abs().clamp_min(smallest).log() + HALF_LOG_MOMENT


def ard_kl(log_alpha: Tensor) -> Tensor:
    """KL to the zero-mean normal prior with the best variance per weight: ½ log(1 + 1 / alpha)."""
    return -0.5 * logsigmoid(log_alpha)


def normal_kl(mean: Tensor | None, log_variance: Tensor, scale: float | Tensor) -> Tensor:
    """KL to a normal prior with mean 0 and standard deviation `scale`."""
    log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
    log_ratio = log_variance - 2 * log_scale
    kl = 0.5 * (log_ratio.expm1() - log_ratio)
    return kl if mean is None else kl + 0.5 * (mean / scale).square()


def normal_kl_sum(mean: Tensor, log_variance: Tensor, scale: float | None) -> Tensor:
    """Sum over weights of `normal_kl`; None: with the best common scale.

    That has scale² = the average of mean² + variance, and as the sum is smallest there, no gradient
    goes through it.
    """
    is_normal = scale is None or scale**2 >= torch.finfo(mean.dtype).tiny
    if is_normal and _can_fuse(mean, log_variance):
        return _NormalKLSum.apply(mean, log_variance, scale)
    return _normal_kl_sum(mean, log_variance, scale)


def _normal_kl_sum(mean: Tensor, log_variance: Tensor, scale: float | None) -> Tensor:
    best = _best_scale(mean, log_variance.exp()) if scale is None else scale
    return normal_kl(mean, log_variance, best).sum()


def _best_scale(mean: Tensor, variance: Tensor) -> Tensor:
    average = (mean.square() + variance).mean()
    return average.clamp_min(torch.finfo(average.dtype).tiny).sqrt()


def binary_dropout_kl(squares: Tensor, p: float | Tensor, scale: float) -> Tensor:
    """KL of weights that are dropped together to a normal prior, up to a constant.

    Weights w = mean · z, z being 0 at rate p and 1 / (1 − p) otherwise, with a little normal noise:
    squares / (2 (1 − p) scale²) − H(p), an L2 penalty less the entropy of what is dropped. It holds
    where the two are apart, mean / (1 − p) ≫ that noise, and is too small by at most H(p) nats
    elsewhere. Where p is learned the entropy is needed: the penalty alone is least at p = 0.

    Args:
        squares: Σ mean² over the weights that are dropped together.
        p: Drop rate, in [0, 1).
        scale: Standard deviation of the prior.
    """
    if not isinstance(p, Tensor) and not 0 <= p < 1:
        raise ValueError(f"p must lie in [0, 1), as the rate at which weights drop, got {p}.")
    p = torch.as_tensor(p, dtype=squares.dtype, device=squares.device)
    entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
    return squares / (2 * (1 - p) * scale**2) - entropy


def normal_to_normal_kl(
    mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor
) -> Tensor:
    """KL to a normal prior with a mean of its own.

    Where both are the same its gradient is exactly zero, so that an optimizer that divides by the
    size of gradients, as Adam does, leaves alone what data say nothing about.
    """
    log_ratio = log_variance - prior_log_variance
    distance = (mean - prior_mean) * (-0.5 * prior_log_variance).exp()
    return 0.5 * (log_ratio.expm1() - log_ratio + distance.square())


def _can_fuse(mean: Tensor, log_variance: Tensor) -> bool:
    """Whether the arguments are ordinary CPU tensors that nothing traces or transforms."""
    return (
        mean.shape == log_variance.shape
        and mean.dtype == log_variance.dtype
        and mean.dtype in _dawson.VALUE
        and mean.device.type == log_variance.device.type == "cpu"
        and mean.numel() > 0
        and can_branch()
    )


class _LogUniformKLSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean: Tensor, log_variance: Tensor, needs_gradient: bool) -> Tensor:
        total, half_gradient = _dawson.kl_sum(
            mean.contiguous(), log_variance.contiguous(), needs_gradient=needs_gradient
        )
        ctx.save_for_backward(mean, log_variance, half_gradient)
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor, Tensor, None]:
        mean, log_variance, half_gradient = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Someone will differentiate the gradient, so it has to be a function of the inputs.
            ratio, inverse_std = _mean_over_std(mean, log_variance)
            half_gradient = _slope(_squared(ratio)) * ratio * inverse_std
        grad_mean = half_gradient * (2 * grad_total)
        return grad_mean, torch.addcmul(grad_mean.new_zeros(()), mean, grad_mean, value=-0.5), None


class _NormalKLSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean: Tensor, log_variance: Tensor, scale: float | None) -> Tensor:
        ctx.scale = scale
        if scale is None:
            scale = _best_scale(mean, log_variance.exp()).item()
        ctx.inverse_variance = scale**-2
        log_ratio = log_variance - 2 * math.log(scale)
        total = (mean * mean).sum() * ctx.inverse_variance - log_ratio.sum()
        excess = log_ratio.expm1_()  # Of the variance over the prior's.
        total += excess.sum()
        ctx.save_for_backward(mean, log_variance, excess)
        return total / 2

    @staticmethod
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor, Tensor, None]:
        mean, log_variance, excess = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Someone will differentiate the gradient, so it has to be a function of the inputs.
            with torch.enable_grad():
                total = _normal_kl_sum(mean, log_variance, ctx.scale)
            by_mean, by_log_variance = torch.autograd.grad(
                total, (mean, log_variance), grad_total, create_graph=True
            )
            return by_mean, by_log_variance, None
        return mean * (ctx.inverse_variance * grad_total), excess * (grad_total / 2), None
