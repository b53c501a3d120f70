"""How much of the rank of an adapter the data ask for."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zeromean.arguments import require_integer, require_model, require_numbers
from zeromean.distributions.from_posterior import is_remembered
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.dropout.unit_noise import SNR_THRESHOLD
from zeromean.layers.lora import LoraLinear, lora_layers
from zeromean.layers.stochastic_layer import StochasticLayer


def prune_lora_(
    model: nn.Module, *, threshold: float | None = None, rank: int | None = None
) -> dict[str, int]:
    """Drop the components of adapters that are more noise than signal; returns ranks by layer.

    A component is a row of A with its column of B, which are independent. Their product has an α
    too, variance over squared mean, with 1 + α = (1 + α_A) (1 + α_B) where each is that of a whole
    row or column. Training spreads one direction over many components. So with Additive weights A
    and B are turned first, into the singular directions of the mean product: that product stays
    as it is, and so do the variances of the turned weights, but not their correlations. Adam's
    moments are of other weights then: build the optimizer anew. What is dropped is exactly zero,
    and stays so through further training.

    Args:
        threshold: Drop where log α > threshold. Default: 0, a signal-to-noise ratio below 1.
        rank: Keep so many of every layer instead, those with the least α.
    """
    require_model(model)
    if threshold is not None and rank is not None:
        raise ValueError(
            f"prune_lora_ takes a threshold or a rank, got {threshold} and {rank}; drop one."
        )
    if threshold is not None:
        require_numbers(threshold=threshold)
    if rank is not None:
        rank = require_integer("rank", rank, at_least=0)
    layers = lora_layers(model)
    if not all(isinstance(layer.up, StochasticLayer) for layer in layers.values()) or not layers:
        raise ValueError("The model has no adapters with random weights; see zm.add_lora_.")
    limit = -2 * math.log(SNR_THRESHOLD) if threshold is None else threshold
    for layer in layers.values():
        _turn_(layer)
        log_alpha = component_log_alpha(layer)
        keep = log_alpha <= limit
        if rank is not None:
            keep = torch.zeros_like(keep)
            keep[log_alpha.argsort()[:rank]] = True
            keep &= log_alpha < math.inf  # What is dropped already.
        _keep_(layer.down.weight, keep[:, None])
        _keep_(layer.up.weight, keep[None])
    return {name: layer.rank for name, layer in layers.items()}


def component_log_alpha(layer: LoraLinear) -> Tensor:
    """log of variance over squared mean of every component of an adapter."""
    signal, total = layer.component_moments()
    return torch.where(signal > 0, (total - signal).clamp_min(0) / signal, math.inf).log()


def _keep_(posterior: Posterior, keep: Tensor) -> None:
    mask = keep.expand(posterior.shape)
    posterior.mask = mask.clone() if posterior.mask is None else posterior.mask & mask


@torch.no_grad()
def _turn_(layer: LoraLinear) -> None:
    """Make the components the singular directions of the mean product, largest first."""
    down, up = layer.down.weight, layer.up.weight
    if type(down) is not Additive or type(up) is not Additive:
        return
    if is_remembered(down) or is_remembered(up):
        return  # Their prior is about the components as they are.
    (a, a_variance), (b, b_variance) = (
        [moment.double() for moment in posterior.moments()] for posterior in (down, up)
    )
    left, singular, right = torch.linalg.svd(b @ a, full_matrices=False)
    rank = len(a)
    root = torch.zeros(rank, dtype=a.dtype, device=a.device)
    count = min(rank, len(singular))
    root[:count] = singular[:count].sqrt()
    root[root <= 1e-6 * root.max()] = 0  # As good as nothing, whose inverse would be noise.
    kept = int((root > 0).sum())
    turn_a = root[:kept, None] * (right[:kept] @ torch.linalg.pinv(a))  # (kept, rank)
    turn_b = (torch.linalg.pinv(b) @ left[:, :kept]) * root[:kept]  # (rank, kept)
    down.mask = up.mask = None
    for posterior, mean, variance in (
        (down, turn_a @ a, turn_a.square() @ a_variance),
        (up, b @ turn_b, b_variance @ turn_b.square()),
    ):
        here = (slice(kept),) if posterior is down else (slice(None), slice(kept))
        posterior.mean.zero_()[here] = mean.to(posterior.dtype)
        posterior.log_variance[here] = variance.log().to(posterior.dtype)
