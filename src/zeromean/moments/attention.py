"""Softmax of random scores, and attention, whose weights are taken as independent of the values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.functional.random_logits import SoftmaxMoments, expected_softmax
from zeromean.layers.attention_masks import added_mask
from zeromean.moments.arithmetic import product
from zeromean.moments.random_tensor import FULL_UP_TO, RandomTensor, known
from zeromean.moments.rules import NoRuleError, register


def softmax_moments(
    x: RandomTensor, dim: int = -1, *, num_points: int | None = None
) -> SoftmaxMoments:
    """Moments of the softmax over a dimension, which comes last in them.

    Args:
        num_points: As of `expected_softmax`, where a covariance is known.
    """
    mean, variance = (part.movedim(dim, -1) for part in x.moments())
    covariance_of = x.covariance_of if dim in (-1, x.dim() - 1) else None
    if covariance_of is not None and mean.shape[-1] <= FULL_UP_TO:
        return expected_softmax(mean, covariance=covariance_of(), num_points=num_points)
    return expected_softmax(mean, variance=variance)


@register(F.softmax, torch.softmax, Tensor.softmax)
def _softmax(x: RandomTensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor:
    dim = -1 if dim is None else dim
    found = softmax_moments(x, dim)
    return RandomTensor(found.mean.movedim(-1, dim), found.variance.movedim(-1, dim))


@register(F.log_softmax, torch.log_softmax, Tensor.log_softmax)
def _log_softmax(x: RandomTensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor:
    """z − log Σ e^z: its exact mean, and the covariance of its slope at the mean."""
    dim = -1 if dim is None else dim
    mean, variance = (part.movedim(dim, -1) for part in x.moments())
    covariance_of = x.covariance_of if dim in (-1, x.dim() - 1) else None
    slope = mean.softmax(-1)
    if covariance_of is not None and mean.shape[-1] <= FULL_UP_TO:
        covariance = covariance_of()
        normalizer = expected_softmax(mean, covariance=covariance).log_normalizer
        shared = covariance @ slope.unsqueeze(-1)
        total = (slope.unsqueeze(-2) @ shared).squeeze(-1)
        moved = covariance - shared - shared.mT + total.unsqueeze(-1)
        spread = moved.diagonal(dim1=-2, dim2=-1).clamp_min(0)
        return RandomTensor(mean - normalizer.unsqueeze(-1), spread, known(moved))
    normalizer = expected_softmax(mean, variance=variance).log_normalizer
    total = (slope.square() * variance).sum(-1, keepdim=True)
    spread = (variance * (1 - 2 * slope) + total).clamp_min(0)
    shifted = mean - normalizer.unsqueeze(-1)
    return RandomTensor(shifted.movedim(-1, dim), spread.movedim(-1, dim))


@register(F.scaled_dot_product_attention)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        raise NoRuleError("Moments have no rule for enable_gqa=True; use method='samples'.")
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.mT
    if is_causal:
        length, others = scores.shape[-2:]
        hidden = torch.ones(length, others, dtype=torch.bool, device=query.device).triu(1)
        attn_mask = ~hidden
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill(~attn_mask, -math.inf)
        scores = scores + attn_mask
    weights = F.dropout(scores.softmax(-1), dropout_p) if dropout_p else scores.softmax(-1)
    random = isinstance(weights, RandomTensor) or isinstance(value, RandomTensor)
    return product(weights, value) if random else weights @ value


@register(F.multi_head_attention_forward)
def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch's function for `(length, batch, features)`, in the same steps."""
    if add_zero_attn or any(t is not None for t in (bias_k, bias_v, static_k, static_v)):
        raise NoRuleError(
            "Moments have no rule for attention with keys of its own (add_bias_kv, add_zero_attn); "
            "use method='samples'."
        )
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if in_proj_weight is not None and not use_separate_proj_weight:
        weights = in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    single = query.dim() == 2
    heads = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        x = F.linear(x.unsqueeze(1) if single else x, weight, bias)
        heads.append(x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3))
    q, k, v = heads
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True needs attn_mask.")
    mask = added_mask(q, k, attn_mask, key_padding_mask)
    scores = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
    attention = (scores if mask is None else scores + mask).softmax(-1)
    if training and dropout_p:
        attention = F.dropout(attention, dropout_p)
    mixed = (attention @ v).permute(2, 0, 1, 3).flatten(2)
    output = F.linear(mixed, out_proj_weight, out_proj_bias)
    shown = attention.mean(1) if average_attn_weights else attention
    if single:
        output, shown = output.squeeze(1), shown.squeeze(0)
    return output, shown if need_weights else None
