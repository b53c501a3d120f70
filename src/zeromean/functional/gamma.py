"""Gamma distributions by their mean and α = variance / mean²: the KL of two, and quantiles.

The concentration is 1 / α and the scale mean · α; α = 1 is the exponential distribution.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# From this concentration on, a few terms of Stirling's series are exact to the last digits.
_LARGE = 20.0
_NEWTON_STEPS = 10


def gamma_kl(
    log_mean: Tensor, log_alpha: Tensor, prior_log_mean: Tensor, prior_log_alpha: Tensor
) -> Tensor:
    """KL between two Gamma distributions, elementwise; nothing cancels where α is small."""
    concentration, prior_concentration = (-log_alpha).exp(), (-prior_log_alpha).exp()
    distance = log_mean - prior_log_mean
    return (
        _entropy_of_shape(prior_concentration)
        - _entropy_of_shape(concentration)
        + prior_concentration
        * (
            _digamma_minus_log(prior_concentration)
            - _digamma_minus_log(concentration)
            + (distance.expm1() - distance)
        )
    )


def gamma_quantile(probability: Tensor, log_alpha: Tensor) -> Tensor:
    """The multiplier of mean 1 below which a Gamma variable lies with this probability.

    Its slope by α, at a fixed probability, is the implicit reparameterization of Figurnov, Mohamed
    & Mnih (2018).
    """
    return _Quantile.apply(probability, (-log_alpha).exp()) * log_alpha.exp()


class _Quantile(torch.autograd.Function):
    """Of a Gamma variable with scale 1."""

    @staticmethod
    def forward(probability: Tensor, concentration: Tensor) -> Tensor:
        return _quantile(*torch.broadcast_tensors(probability, concentration))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        concentration, quantile = ctx.saved_tensors
        like = concentration.expand_as(quantile)
        slope = torch._standard_gamma_grad(like, quantile)  # pyright: ignore
        return None, (grad * slope).sum_to_size(concentration.shape)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], probability: Tensor, concentration: Tensor
    ) -> tuple[Tensor, int]:
        # Elementwise, so that samples are one more dimension in front of all others.
        tensors = (probability, concentration)
        ranks = [t.dim() - (d is not None) for t, d in zip(tensors, in_dims, strict=True)]
        fronts = []
        for tensor, dim, rank in zip(tensors, in_dims, ranks, strict=True):
            front = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
            fronts.append(front.reshape(len(front), *[1] * (max(ranks) - rank), *front.shape[1:]))
        return _Quantile.apply(*fronts), 0


def _quantile(probability: Tensor, concentration: Tensor) -> Tensor:
    """By Newton's method on the logarithm of the nearer tail, as a function of y = log x.

    It is concave, so that every step after the first comes from the same side.
    """
    tiny = torch.finfo(probability.dtype).tiny
    lower = probability <= 0.5
    tail = torch.where(lower, probability, 1 - probability).clamp_min(tiny)
    log_gamma = torch.lgamma(concentration)
    # It starts from Wilson and Hilferty's cube where concentrations are large, and from the first
    # term of the series where they are small.
    step = 1 / (9 * concentration)
    cube = 1 - step + torch.special.ndtri(probability.clamp(tiny, 1 - 1e-7)) * step.sqrt()
    by_cube = concentration.log() + 3 * cube.clamp_min(0.05).log()
    log_probability = probability.clamp_min(tiny).log()
    by_series = (log_probability + torch.lgamma(concentration + 1)) / concentration
    y = torch.where(cube > 0.3, by_cube, torch.minimum(by_series, by_cube))
    for _ in range(_NEWTON_STEPS):
        x = y.exp()
        below = torch.special.gammainc(concentration, x)
        above = torch.special.gammaincc(concentration, x)
        mass = torch.where(lower, below, above).clamp_min(tiny)
        density = (concentration * y - x - log_gamma).exp().clamp_min(tiny)
        step = ((mass / tail).log() * mass / density).clamp(-2, 2)
        y = y - torch.where(lower, step, -step)
    return y.exp()


def _entropy_of_shape(k: Tensor) -> Tensor:
    """Entropy of log x for a Gamma variable x: k + log Γ(k) − k ψ(k)."""
    small, large = k.clamp_max(_LARGE), k.clamp_min(_LARGE)
    exact = small + torch.lgamma(small) - small * torch.digamma(small)
    inverse = 1 / large
    square = inverse.square()
    series = inverse * (1 / 6 - square * (1 / 90 - square * (1 / 210 - square / 210)))
    series = series + 0.5 * (math.log(2 * math.pi * math.e) - large.log())
    return torch.where(k < _LARGE, exact, series)


def _digamma_minus_log(k: Tensor) -> Tensor:
    """ψ(k) − log k = E log x of a Gamma variable with mean 1."""
    small, large = k.clamp_max(_LARGE), k.clamp_min(_LARGE)
    exact = torch.digamma(small) - small.log()
    inverse = 1 / large
    square = inverse.square()
    series = -0.5 * inverse - square * (1 / 12 - square * (1 / 120 - square * (1 / 252)))
    return torch.where(k < _LARGE, exact, series)
