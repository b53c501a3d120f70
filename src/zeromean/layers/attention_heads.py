"""What the heads of attention compute from their queries, keys and values."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """From `(N, L, heads * features)` to `(N, heads, L, features)`."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    causal: bool,
    need_weights: bool,
    average: bool,
) -> tuple[Tensor, Tensor | None]:
    """The heads' outputs next to each other, `(N, L, heads * features)`, and their weights.

    Args:
        q: Queries, `(N, heads, L, features)`; keys and values likewise.
        mask: What is added to the scores.
        dropout: Rate at which weights are dropped.
        causal: Hide what comes later; where no weights are asked for, and there is no mask.
        average: Return the average of the weights over the heads.
    """
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        mixed = weights @ v
        weights = weights.mean(1) if average else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    return mixed.transpose(1, 2).flatten(2), weights
