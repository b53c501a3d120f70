"""Attention whose projections have random weights: the twin of torch's nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.arguments import (
    require_flag,
    require_floating,
    require_integer,
    require_numbers,
    require_same_dtype,
)
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.posterior import Posterior, PosteriorFactory
from zeromean.layers.attention_heads import attend, split_heads
from zeromean.layers.attention_masks import added_mask
from zeromean.layers.multi_weight_layer import MultiWeightLayer
from zeromean.layers.stochastic_layer import (
    PriorChoice,
    SamplerChoice,
    build_posterior,
    checked_prior,
    checked_sampler,
)
from zeromean.layers.stochastic_module import own_sampler
from zeromean.registry import register
from zeromean.samplers.kinds import Draws, drawn_by, needs_normal_noise
from zeromean.samplers.linear_maps import Dense, Projections
from zeromean.samplers.sampler import Sampler


class OutProjection(nn.Module):
    """What torch keeps under `out_proj`: a weight, here random, and a bias."""

    weight: Posterior
    bias: nn.Parameter | None

    def __init__(self, weight: Posterior, bias: nn.Parameter | None):
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor, sampler: Sampler) -> Tensor:
        return sampler(Dense(), input, self.weight, self.bias)


@register("layer")
class MultiheadAttention(MultiWeightLayer):
    """`nn.MultiheadAttention` with random projections, called as torch's.

    The weights have torch's names: `in_proj_weight` for queries, keys and values together, or
    `q_proj_weight`, `k_proj_weight` and `v_proj_weight` where their sizes differ, and
    `out_proj.weight`. Biases are deterministic.

    The default posterior is `zm.Additive`, not the zero mean of the other layers: queries and keys
    without means meet by chance alone, and attention does not learn where to look (where one token
    names the place of another, zero-mean attention stays at chance).

    Args:
        embed_dim: Features of the queries and of the output.
        num_heads: Heads, each with `embed_dim / num_heads` of the features.
        dropout: Rate of the dropout on attention weights, in training and Monte-Carlo prediction.
        bias: Whether the projections have biases.
        add_bias_kv: Learn a further key and value, which every query sees.
        add_zero_attn: Add a key and a value of zeros.
        kdim: Features of the keys. Default: embed_dim.
        vdim: Features of the values. Default: embed_dim.
        batch_first: Inputs and outputs are `(N, L, features)` in place of `(L, N, features)`.
        posterior: What q(W) of every projection is.
        prior: What the KL term compares it with, None for no KL term.
            Default: LogUniform() for normal noise, None for other noise.
        sampler: How a projection is drawn. Default: `zm.local` for normal noise, else `zm.weight`.
    """

    torch_twin = nn.MultiheadAttention
    in_proj_weight: Posterior | None
    q_proj_weight: Posterior
    k_proj_weight: Posterior
    v_proj_weight: Posterior
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        posterior: PosteriorFactory = Additive,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.embed_dim = require_integer("embed_dim", embed_dim, at_least=1)
        self.num_heads = require_integer("num_heads", num_heads, at_least=1)
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}."
            )
        require_numbers(dropout=dropout)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must lie between 0 and 1, got {dropout}.")
        self.dropout = dropout
        self.kdim = embed_dim if kdim is None else require_integer("kdim", kdim, at_least=1)
        self.vdim = embed_dim if vdim is None else require_integer("vdim", vdim, at_least=1)
        self.add_zero_attn = require_flag("add_zero_attn", add_zero_attn)
        self.batch_first = require_flag("batch_first", batch_first)
        # torch's transformer layers ask for it.
        self._qkv_same_embed_dim = self.kdim == self.vdim == embed_dim
        place: dict[str, Any] = {"device": device, "dtype": dtype}

        def weight(rows: int, columns: int) -> Posterior:
            return build_posterior(posterior, (rows, columns), **place)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **place))

        if self._qkv_same_embed_dim:
            self.in_proj_weight = weight(3 * embed_dim, embed_dim)
        else:
            self.in_proj_weight = None
            self.q_proj_weight = weight(embed_dim, embed_dim)
            self.k_proj_weight = weight(embed_dim, self.kdim)
            self.v_proj_weight = weight(embed_dim, self.vdim)
        with_bias, with_kv = require_flag("bias", bias), require_flag("add_bias_kv", add_bias_kv)
        self.register_parameter("in_proj_bias", parameter(3 * embed_dim) if with_bias else None)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, parameter(1, 1, embed_dim) if with_kv else None)
        out_bias = parameter(embed_dim) if with_bias else None
        self.out_proj = OutProjection(weight(embed_dim, embed_dim), out_bias)
        self.prior = checked_prior(prior, self.out_proj.weight)
        self.sampler = checked_sampler(sampler, self.out_proj.weight)
        self._reset_biases()

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
        self._check_inputs(query, key, value)
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal=True says that attn_mask is causal, but there is none; pass "
                "nn.Transformer.generate_square_subsequent_mask(length) as attn_mask."
            )
        single = query.dim() == 2
        q, k, v = self._projected(*self._batched(query, key, value))
        q, k, v = (split_heads(part, self.num_heads) for part in (q, k, v))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else added_mask(q, k, attn_mask, key_padding_mask)
        if self.bias_k is not None or self.add_zero_attn:
            if causal:
                causal, mask = False, added_mask(q, k, attn_mask, None)
            k, v, mask = self._with_further_keys(k, v, mask)
        mixed, weights = attend(
            *(q, k, v, mask),
            dropout=self.dropout if self.training else 0.0,
            causal=causal,
            need_weights=need_weights,
            average=average_attn_weights,
        )
        output = self.out_proj(mixed, self.sampler)
        if single:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def accepted_sampler(self, sampler: Sampler) -> Sampler:
        if drawn_by(sampler) is Draws.CHEAPER and not needs_normal_noise(own_sampler(self)):
            # What another sampler has trained may not be drawn in any other way.
            return own_sampler(self)
        return checked_sampler(sampler, self.out_proj.weight)

    def plain_twin(self) -> nn.MultiheadAttention:
        return nn.MultiheadAttention(**self._geometry(), device="meta")

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> Self:
        return cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            module.in_proj_bias is not None,
            module.bias_k is not None,
            module.add_zero_attn,
            module.kdim,
            module.vdim,
            module.batch_first,
            **options,
        )

    def reset_parameters(self) -> None:
        for posterior in self.posteriors().values():
            posterior.reset_parameters()
        self._reset_biases()

    def extra_repr(self) -> str:
        usual = {"dropout": 0.0, "bias": True, "kdim": self.embed_dim, "vdim": self.embed_dim}
        said = [f"{n}={v}" for n, v in self._geometry().items() if v != usual.get(n, False)]
        sampler = getattr(self.sampler, "__name__", repr(self.sampler))
        return ", ".join([*said, f"prior={self.prior}", f"sampler={sampler}"])

    def _geometry(self) -> dict[str, Any]:
        """torch's arguments."""
        return {
            "embed_dim": self.embed_dim,
            "num_heads": self.num_heads,
            "dropout": self.dropout,
            "bias": self.in_proj_bias is not None,
            "add_bias_kv": self.bias_k is not None,
            "add_zero_attn": self.add_zero_attn,
            "kdim": self.kdim,
            "vdim": self.vdim,
            "batch_first": self.batch_first,
        }

    def _reset_biases(self) -> None:
        """As torch does."""
        for name, bias in self.biases().items():
            if name in ("bias_k", "bias_v"):
                nn.init.xavier_normal_(bias)
            else:
                nn.init.zeros_(bias)

    def _batched(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs as `(N, L, features)`; what was one tensor still is."""

        def batched(x: Tensor) -> Tensor:
            if x.dim() == 2:
                return x.unsqueeze(0)
            return x if self.batch_first else x.transpose(0, 1)

        q = batched(query)
        k = q if key is query else batched(key)
        v = k if value is key else q if value is query else batched(value)
        return q, k, v

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, `(N, L, embed_dim)`."""
        bias = self.in_proj_bias
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            biases = (None, None, None) if bias is None else bias.chunk(3)
            inputs = zip((query, key, value), weights, biases, strict=True)
            return tuple(self.sampler(Dense(), x, weight, b) for x, weight, b in inputs)
        if query is key is value:
            return self.sampler(Dense(), query, self.in_proj_weight, bias).chunk(3, -1)
        # One weight is drawn for all of them, whatever the sampler.
        parts, widths = [query], [self.embed_dim]
        for x in (key, value):
            if x is parts[-1]:
                widths[-1] += self.embed_dim
            else:
                parts, widths = [*parts, x], [*widths, self.embed_dim]
        op = Projections(tuple(x.shape[1] for x in parts), tuple(widths))
        together = torch.cat(parts, dim=1)
        outputs = op.split(self.sampler(op, together, self.in_proj_weight, bias))
        return tuple(one for part in outputs for one in part.split(self.embed_dim, -1))

    def _with_further_keys(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values with the learned ones and with zeros, which no mask hides."""
        further = []
        if self.bias_k is not None and self.bias_v is not None:
            shape = (1, 1, self.num_heads, -1)
            further.append([b.view(shape).transpose(1, 2) for b in (self.bias_k, self.bias_v)])
        if self.add_zero_attn:
            further.append([part.new_zeros(1, 1, 1, 1) for part in (k, v)])
        for more_k, more_v in further:
            k = torch.cat([k, more_k.to(k.dtype).expand_as(k[:, :, :1])], dim=2)
            v = torch.cat([v, more_v.to(v.dtype).expand_as(v[:, :, :1])], dim=2)
            mask = None if mask is None else F.pad(mask, (0, 1))
        return k, v, mask

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        sizes = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, size), x in zip(sizes.items(), (query, key, value), strict=True):
            require_floating("MultiheadAttention", x)
            require_same_dtype("MultiheadAttention", x, self.out_proj.weight.dtype)
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != size:
                order = "N, L" if self.batch_first else "L, N"
                raise ValueError(
                    f"MultiheadAttention needs a {name} of shape ({order}, {size}), or (L, {size}) "
                    f"for one sequence, got {tuple(x.shape)}."
                )
        examples = None if query.dim() == 2 else 0 if self.batch_first else 1
        fits = key.shape[:-1] == value.shape[:-1]
        if not fits or (examples is not None and key.shape[examples] != query.shape[examples]):
            raise ValueError(
                "Keys and values must have one length, and all three the same number of sequences, "
                f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
            )
