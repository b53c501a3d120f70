"""Attention without noise on its weights, whose heads need not fill the features of its output.

torch's nn.MultiheadAttention has heads of `embed_dim / num_heads` features, so that none can be
taken away, and never calls its layer `out_proj`, so that nothing can stand in front of it. This
one is called as torch's, has weights of the same names, and lets one do both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.layers.attention_heads import attend, split_heads
from zeromean.layers.attention_masks import added_mask
from zeromean.layers.surgery import replace_modules_


class PlainAttention(nn.Module):
    """Attention with any number of heads of any size, called as torch's nn.MultiheadAttention.

    Args:
        embed_dim: Features of the queries and of the output.
        num_heads: Heads that there are.
        head_dim: Features of each.
        kdim: Features of the keys. Default: embed_dim.
        vdim: Features of the values. Default: embed_dim.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.bias, self.batch_first = dropout, bias, batch_first
        # torch's transformer layers ask for it.
        self._qkv_same_embed_dim = self.kdim == self.vdim == embed_dim
        width = num_heads * head_dim

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, **place))

        together = self._qkv_same_embed_dim
        alone = {"q": embed_dim, "k": self.kdim, "v": self.vdim}
        weight = parameter(3 * width, embed_dim) if together else None
        self.register_parameter("in_proj_weight", weight)
        for name, features in alone.items():
            weight = None if together else parameter(width, features)
            self.register_parameter(f"{name}_proj_weight", weight)
        self.register_parameter("in_proj_bias", parameter(3 * width) if bias else None)
        self.out_proj = nn.Linear(width, embed_dim, bias, **place)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        single, of_itself = query.dim() == 2, query is key is value
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        parts = self._projected(query, key, value, of_itself)
        q, k, v = (split_heads(part, self.num_heads) for part in parts)
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else added_mask(q, k, attn_mask, key_padding_mask)
        mixed, seen = attend(
            *(q, k, v, mask),
            dropout=self.dropout if self.training else 0.0,
            causal=causal,
            need_weights=need_weights,
            average=average_attn_weights,
        )
        output = self.out_proj(mixed)
        if single:
            return output.squeeze(0), None if seen is None else seen.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), seen

    def with_heads(self, keep: Tensor) -> PlainAttention:
        """The same with some of its heads."""
        new = PlainAttention(**{**self.geometry(), "num_heads": int(keep.sum())}, device="meta")
        rows = keep.repeat_interleave(self.head_dim)
        places = {"in_proj_weight": rows.repeat(3), "in_proj_bias": rows.repeat(3)}
        for name, parameter in self._parameters.items():
            if parameter is not None:
                kept = parameter.detach()[places.get(name, rows)]
                new._parameters[name] = nn.Parameter(kept, parameter.requires_grad)
        for name, parameter in self.out_proj._parameters.items():
            if parameter is not None:
                kept = parameter.detach()
                kept = kept[:, rows].clone() if name == "weight" else kept.clone()
                new.out_proj._parameters[name] = nn.Parameter(kept, parameter.requires_grad)
        return new.train(self.training)

    def geometry(self) -> dict[str, Any]:
        """The arguments that would build it."""
        names = ("embed_dim", "num_heads", "head_dim", "dropout", "bias", "kdim", "vdim")
        return {name: getattr(self, name) for name in (*names, "batch_first")}

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, of_itself: bool
    ) -> tuple[Tensor, ...]:
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and of_itself:
            return F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            named = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            weights = tuple(weight for weight in named if weight is not None)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        inputs = zip((query, key, value), weights, biases, strict=True)
        return tuple(F.linear(*each) for each in inputs)


def from_torch(attention: nn.MultiheadAttention) -> PlainAttention:
    """The same attention, with the parameters of torch's and with its layer `out_proj`."""
    plain = PlainAttention(
        attention.embed_dim,
        attention.num_heads,
        attention.head_dim,
        attention.dropout,
        attention.in_proj_bias is not None,
        attention.kdim,
        attention.vdim,
        attention.batch_first,
        device="meta",
    )
    plain._parameters.update({name: attention._parameters[name] for name in plain._parameters})
    plain.out_proj = attention.out_proj
    return plain.train(attention.training)


def to_torch(plain: PlainAttention) -> nn.MultiheadAttention:
    """torch's attention with the parameters of this one, whose heads must fill its output."""
    attention = nn.MultiheadAttention(
        plain.embed_dim,
        plain.num_heads,
        plain.dropout,
        plain.bias,
        kdim=plain.kdim,
        vdim=plain.vdim,
        batch_first=plain.batch_first,
        device="meta",
    )
    attention._parameters.update(plain._parameters)
    attention.out_proj._parameters.update(plain.out_proj._parameters)
    return attention.train(plain.training)


def has_simple_heads(layer: Any) -> bool:
    """Whether heads of this attention can be taken away, as far as the layer is concerned."""
    if type(layer) is PlainAttention:
        return True
    simple = type(layer) is nn.MultiheadAttention and layer.bias_k is None
    return simple and not layer.add_zero_attn


def call_output_layers_(model: nn.Module, names: set[str]) -> None:
    """Let the attention that these output layers belong to call them, and so their hooks."""
    owners = {name.rpartition(".")[0] for name in names}
    found = {name: m for name, m in model.named_modules() if name in owners}
    torchs = [m for m in found.values() if type(m) is nn.MultiheadAttention]
    replace_modules_(model, {m: from_torch(m) for m in torchs})


def restore_torchs_(model: nn.Module) -> None:
    """Put torch's attention in place of all that need not be anything else."""
    found = [m for m in model.modules() if type(m) is PlainAttention]
    whole = [m for m in found if m.num_heads * m.head_dim == m.embed_dim]
    replace_modules_(model, {m: to_torch(m) for m in whole})
