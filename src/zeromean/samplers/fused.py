"""Local reparameterization with few passes and little memory: the fast twin of `samplers.local`.

It draws from the same distribution and has the same gradients as `samplers.plain_local`, which is
its reference, and which runs wherever a custom autograd function would stand in the way: under
torch.compile, torch.export, torch.func transforms and autocast, and without gradients. The same
seed gives both the same noise, since checkpointing runs a layer once without gradients and once
with them. With ε the noise and v the variance of the outputs,

    output = op(x, mean) + ε·√v = op(x, mean) + r·v,    r = ε/√v,

so that r is all that the backward pass needs beyond what a deterministic layer keeps. It keeps the
half of it, which takes the ½ of the square root along:

    ∂x = opᵀ(g, mean) + 2 x·opᵀ(g·r/2, variance),    ∂variance = op_w(g·r/2, x²)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.spread import Spread
from zeromean.functional.numerics import can_branch, safe_sqrt
from zeromean.samplers.linear_maps import Convolution, Dense, LinearMap, arranged, squared

# Chunks of three tensors fit a core's second-level cache.
_CHUNK = 2**16
# torch draws fewer normal numbers than this by another algorithm, which gives other numbers.
_FEWEST = 16


def can_fuse(op: LinearMap, x: Tensor) -> bool:
    """Whether autograd is recording in plain eager mode, which is what the fused version is for."""
    return (
        isinstance(op, (Dense, Convolution))
        and x.dtype in (torch.float32, torch.float64)
        and x.device.type != "meta"
        and torch.is_grad_enabled()
        and can_branch()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled(x.device.type)
    )


def draw_local(
    op: LinearMap, x: Tensor, posterior: FactorizedPosterior, bias: Tensor | None
) -> Tensor:
    """Draw op(x, W) + bias by local reparameterization."""
    return _DrawLocal.apply(op, x, *posterior.mean_and_spread(), bias)


class _DrawLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: Dense | Convolution,
        x: Tensor,
        mean: Tensor | None,
        spread: Tensor,
        kind: Spread,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.op, ctx.kind = op, kind
        ctx.memory_format = memory_format = op.better_format(x, spread.shape)
        inputs = arranged(x, memory_format)
        output_variance = op(squared(inputs), arranged(kind.variance(spread), memory_format))
        output = None if mean is None else op(inputs, arranged(mean, memory_format), bias)
        if output is not None and output.stride() != output_variance.stride():
            # A weight in channels_last can decide the format of one product and not of the other.
            output_variance = torch.empty_like(output).copy_(output_variance)
        output = _add_noise_(output, output_variance)
        if mean is None and bias is not None:
            output.add_(op.align_bias(bias))
        ctx.save_for_backward(x, mean, spread, output_variance)
        return output if memory_format is None else output.contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        op: Dense | Convolution = ctx.op
        x, mean, spread, half_ratio = ctx.saved_tensors
        _, needs_x, needs_mean, needs_spread, _, needs_bias = ctx.needs_input_grad
        variance = ctx.kind.variance(spread)
        differentiable = torch.is_grad_enabled()
        if differentiable:
            # Someone will differentiate the gradient: r has to be a function of x and variance.
            std = safe_sqrt(op(x.square(), variance))
            positive = std > 0
            half_noise = (half_ratio * std).detach()
            half_ratio = torch.where(positive, half_noise / torch.where(positive, std, 1.0), 0.0)
        inputs, grad = arranged(x, ctx.memory_format), arranged(grad, ctx.memory_format)
        grad_x, grad_spread = op.pull_back(
            grad * half_ratio,
            squared(inputs),
            arranged(variance, ctx.memory_format),
            (needs_x, needs_spread),
        )
        if grad_spread is not None:
            grad_spread = ctx.kind.pull_back(grad_spread, spread, variance)
        through_mean = grad_mean = None
        if mean is not None:
            weight = arranged(mean, ctx.memory_format)
            through_mean, grad_mean = op.pull_back(grad, inputs, weight, (needs_x, needs_mean))
        if grad_x is not None:
            # In place where nobody differentiates: these are the largest tensors.
            place = None if differentiable else grad_x if through_mean is None else through_mean
            start = grad_x.new_zeros(()) if through_mean is None else through_mean
            grad_x = torch.addcmul(start, grad_x, inputs, value=2, out=place)
            if ctx.memory_format is not None:
                grad_x = grad_x.contiguous()
        grad_bias = op.sum_to_bias(grad) if needs_bias else None
        return None, grad_x, grad_mean, grad_spread, None, grad_bias


def _add_noise_(output: Tensor | None, variance: Tensor) -> Tensor:
    """Add ε·√v to the output in place (None is zero), and turn the variance into r/2 = ½ε/√v.

    Chunk by chunk, so that the chain of element-wise operations stays in the cache and needs no
    temporary tensor of the size of the output.
    """
    result = torch.empty_like(variance) if output is None else output
    tiny = torch.finfo(variance.dtype).tiny
    # Elsewhere, several launches are slow, and draw other numbers than the one without gradients.
    on_cpu = variance.device.type == "cpu"
    sizes = _chunk_sizes(variance.numel()) if on_cpu else [variance.numel()]
    inverse_std, ratio = variance.new_empty(2, max(sizes)).unbind()
    for out, v in zip(*(_in_memory(t).split(sizes) for t in (result, variance)), strict=True):
        if v.numel() < ratio.numel():
            inverse_std, ratio = inverse_std[: v.numel()], ratio[: v.numel()]
        # rsqrt(inf) = 0: no variance, no noise and no gradient.
        torch.threshold(v, tiny, math.inf, out=inverse_std).rsqrt_()
        ratio.normal_().mul_(inverse_std)
        if output is None:
            torch.mul(ratio, v, out=out)
        else:
            out.addcmul_(ratio, v)
        torch.mul(ratio, 0.5, out=v)
    return result


def _chunk_sizes(number: int) -> list[int]:
    """Sizes of chunks, none so small that torch would draw its noise in another way."""
    whole, rest = divmod(number, _CHUNK)
    if whole and rest < _FEWEST:
        return [*[_CHUNK] * (whole - 1), _CHUNK + rest]
    return [*[_CHUNK] * whole, rest]


def _in_memory(tensor: Tensor) -> Tensor:
    """A dense tensor as a vector, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
