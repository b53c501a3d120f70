"""Masks of attention, in torch's two forms, as one tensor that is added to the scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeromean.arguments import shown


def added_mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> Tensor | None:
    """What is added to the scores, in a shape that broadcasts to `(N, heads, L, S)`.

    Args:
        q: Queries, `(N, heads, L, features)`.
        k: Keys, `(N, heads, S, features)`.
        attn_mask: `(L, S)` or `(N * heads, L, S)`; True hides, numbers are added.
        key_padding_mask: `(N, S)`, or `(S,)` for one sequence; likewise.
    """
    num, heads, length, source = *q.shape[:3], k.shape[2]
    mask = None
    if attn_mask is not None:
        if attn_mask.shape not in ((length, source), (num * heads, length, source)):
            raise ValueError(
                f"attn_mask must have the shape {(length, source)} or "
                f"{(num * heads, length, source)}, got {tuple(attn_mask.shape)}."
            )
        mask = _as_numbers("attn_mask", attn_mask, q)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (num, heads))
    if key_padding_mask is not None:
        padding = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None]
        if padding.shape != (num, source):
            raise ValueError(
                f"key_padding_mask must have the shape {(num, source)}, got "
                f"{tuple(key_padding_mask.shape)}."
            )
        padding = _as_numbers("key_padding_mask", padding, q)[:, None, None]
        mask = padding if mask is None else mask + padding
    return mask


def _as_numbers(name: str, mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add: −∞ where a boolean one is True."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=like.dtype, device=mask.device)
        return zeros.masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be of bool or floating point, got {shown(mask)}.")
    return mask.to(like.dtype)
