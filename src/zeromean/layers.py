"""Layers with random weights: what every one has, and the twins of torch's Linear and Embedding.

The convolutions are in `convolutions.py`.

`layer.weight` is the posterior (what q(W) is), `layer.prior` what it is compared with and
`layer.sampler` how an output is drawn. The default is a variance layer: zero mean, normal noise,
local reparameterization. Layers sample in train and eval mode alike; see `zm.sampling`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    nearest,
    require_dtype,
    require_flag,
    require_floating,
    require_function,
    require_integer,
    require_model,
    require_same_dtype,
    shown,
)
from zeromean.linear_maps import Dense, LinearMap, LookUp
from zeromean.noise import normal
from zeromean.posteriors import Posterior, PosteriorFactory, WeightLayout, ZeroMean
from zeromean.priors import LogUniform, Prior
from zeromean.samplers import SAMPLERS, Sampler, auto, local, weight
from zeromean.stochastic import StochasticModule, own_sampler

PriorChoice = Prior | None | Literal["default"]
SamplerChoice = Sampler | Literal["default"]


class StochasticLayer(StochasticModule):
    """A linear map with a random weight and a deterministic bias.

    Args:
        posterior: The distribution of the weight.
        bias_size: Length of the bias, None for none.
        prior: What the KL term compares the posterior with, None for no KL term.
            Default: LogUniform() for normal noise, None for other noise.
        sampler: How an output is drawn. Default: `zm.local` for normal noise, else `zm.weight`.
    """

    torch_twin: Callable[..., Any]
    weight: Posterior
    bias: nn.Parameter | None

    def __init__(
        self,
        posterior: Posterior,
        bias_size: int | None,
        prior: PriorChoice,
        sampler: SamplerChoice,
    ):
        super().__init__()
        self.weight = posterior
        self.prior = checked_prior(prior, posterior)
        self.sampler = checked_sampler(sampler, posterior)
        bias = None
        if bias_size is not None:
            bias = nn.Parameter(
                torch.empty(bias_size, device=posterior.device, dtype=posterior.dtype)
            )
        self.register_parameter("bias", bias)
        self._reset_bias()

    def linear_map(self) -> LinearMap:
        """The map that `forward` applies to the prepared input."""
        raise NotImplementedError

    def prepare(self, x: Tensor) -> Tensor:
        """Check an input and bring it into the form that the linear map takes."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        return self.sampler(self.linear_map(), self.prepare(input), self.weight, self.bias)

    def plain_twin(self) -> nn.Module:
        """torch's layer of the same geometry, on the meta device."""
        raise NotImplementedError

    def accepted_sampler(self, sampler: Sampler) -> Sampler:
        if sampler is auto and own_sampler(self) is not local:
            # What another sampler has trained may not be drawn in any other way.
            return own_sampler(self)
        return checked_sampler(sampler, self.weight)

    def distributions(self) -> dict[str, nn.Module]:
        return {"weight": self.weight}

    def kl_terms(self) -> dict[nn.Module, Callable[[], Tensor]]:
        return {} if self.prior is None else {self.weight: partial(self.prior.kl, self.weight)}

    def reset_parameters(self) -> None:
        self.weight.reset_parameters()
        self._reset_bias()

    def _reset_bias(self) -> None:
        if self.bias is not None:
            bound = self.weight.initial_bound
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"bias={self.bias is not None}, prior={self.prior}, sampler={_name(self.sampler)}"


class Linear(StochasticLayer):
    """`nn.Linear` with a random weight: `(*, in_features)` to `(*, out_features)`."""

    torch_twin = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        posterior: PosteriorFactory = ZeroMean,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        in_features = require_integer("in_features", in_features, at_least=1)
        out_features = require_integer("out_features", out_features, at_least=1)
        shape = (out_features, in_features)
        distribution = build_posterior(posterior, shape, device=device, dtype=dtype)
        bias_size = out_features if require_flag("bias", bias) else None
        super().__init__(distribution, bias_size, prior, sampler)
        self.in_features = in_features
        self.out_features = out_features

    def linear_map(self) -> LinearMap:
        return Dense()

    def prepare(self, x: Tensor) -> Tensor:
        require_floating("Linear", x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"Linear needs an input of shape (*, {self.in_features}), got {tuple(x.shape)}; "
                "flatten or transpose it so that the features come last."
            )
        require_same_dtype("Linear", x, self.weight.dtype)
        return x

    def plain_twin(self) -> nn.Module:
        bias = self.bias is not None
        return nn.Linear(self.in_features, self.out_features, bias, device="meta")

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {super().extra_repr()}"


class Embedding(StochasticLayer):
    """`nn.Embedding` with a random weight; the row of `padding_idx` is zero and has no noise.

    With `zm.local` and `zm.moment_matched` only the rows that are looked up are computed; the
    others draw or copy the whole table. With `zm.weight` a repeated token repeats its noise, with
    `zm.flipout` its magnitude, with `zm.local` neither.
    """

    torch_twin = nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        posterior: PosteriorFactory = ZeroMean,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        num_embeddings = require_integer("num_embeddings", num_embeddings, at_least=1)
        embedding_dim = require_integer("embedding_dim", embedding_dim, at_least=1)
        if padding_idx is not None:
            padding_idx = require_integer("padding_idx", padding_idx)
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx must lie within the {num_embeddings} embeddings, "
                    f"got {padding_idx}."
                )
            padding_idx %= num_embeddings
        layout = WeightLayout(fan_in=1, neuron_dim=1, noiseless_row=padding_idx)
        shape = (num_embeddings, embedding_dim)
        distribution = build_posterior(posterior, shape, layout=layout, device=device, dtype=dtype)
        super().__init__(distribution, None, prior, sampler)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx

    def linear_map(self) -> LinearMap:
        return LookUp(self.padding_idx)

    def prepare(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"Embedding needs a tensor of indices, got {shown(x)}; use torch.as_tensor(x)."
            )
        if x.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"Embedding needs indices of dtype int64 or int32, got {x.dtype}; use x.long()."
            )
        return x

    def plain_twin(self) -> nn.Module:
        return nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta"
        )

    def extra_repr(self) -> str:
        sizes = f"{self.num_embeddings}, {self.embedding_dim}"
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{sizes}{padding}, {super().extra_repr()}"


def checked_sampler(sampler: SamplerChoice, posterior: Posterior) -> Sampler:
    """The sampler, or an error where its theory does not cover the posterior."""
    if isinstance(sampler, str) and sampler == "default":
        return local if posterior.noise is normal else weight
    require_function("sampler", sampler, nearest(sampler, list(SAMPLERS)))
    assert not isinstance(sampler, str)
    if sampler is local and posterior.noise is not normal:
        raise ValueError(
            f"zm.local needs normal noise, got {_name(posterior.noise)}; use sampler=zm.weight, or "
            "zm.moment_matched for its normal approximation."
        )
    return sampler


def checked_prior(prior: PriorChoice, posterior: Posterior) -> Prior | None:
    """The prior, or an error where its KL does not cover the posterior."""
    if isinstance(prior, str) and prior == "default":
        return LogUniform() if posterior.noise is normal else None
    if prior is None:
        return None
    if isinstance(prior, type) or not isinstance(prior, Prior):
        raise TypeError(
            f"prior must have a method kl(posterior), got {shown(prior)}; use {_prior_hint(prior)}."
        )
    if posterior.noise is not normal:
        raise ValueError(
            f"The KL of {prior} needs normal noise, got {_name(posterior.noise)}; use prior=None."
        )
    return prior


def build_posterior(factory: PosteriorFactory, shape: Sequence[int], **options: Any) -> Posterior:
    """The posterior that a factory makes for a weight of this shape."""
    require_factory(factory)
    require_dtype(options.get("dtype"))
    try:
        inspect.signature(factory).bind(shape, **options)
    except TypeError as error:
        wanted = ", ".join(["shape", *(f"{name}=…" for name in options)])
        raise TypeError(
            f"posterior is called as posterior({wanted}), which {shown(factory)} does not take: "
            f"{error}."
        ) from error
    except ValueError:
        pass  # What is written in C does not say what it takes.
    posterior = factory(shape, **options)
    if not isinstance(posterior, Posterior):
        raise TypeError(
            f"posterior must make a zm.Posterior, but {shown(factory)} made {shown(posterior)}; "
            "use a class such as zm.Additive, or functools.partial of one."
        )
    return posterior


def require_factory(factory: Any) -> None:
    """Refuse what is not a posterior class or a function that makes one."""
    of_class = isinstance(factory, type) and issubclass(factory, Posterior)
    if (
        isinstance(factory, nn.Module)
        or not callable(factory)
        or (isinstance(factory, type) and not of_class)
    ):
        raise TypeError(
            "posterior must be a class such as zm.Additive, or functools.partial of one, got "
            f"{shown(factory)}; use {nearest(factory, _POSTERIORS)}."
        )


def stochastic_layers(model: nn.Module) -> dict[str, StochasticLayer]:
    """The layers with one random weight by name, shared ones once: not LSTM and GRU."""
    require_model(model)
    return {n: m for n, m in model.named_modules() if isinstance(m, StochasticLayer)}


def _prior_hint(prior: Any) -> str:
    if isinstance(prior, type) and isinstance(prior, Prior):
        return f"an instance: {prior.__name__}()"
    found = nearest(prior, _PRIORS)
    return f"{found}()" if " or " not in found else "zm." + "(), zm.".join(_PRIORS) + "() or None"


_POSTERIORS = ("ZeroMean", "Multiplicative", "Additive")
_PRIORS = ("LogUniform", "StudentT", "ARD", "Normal")


def _name(function: Any) -> str:
    return getattr(function, "__name__", repr(function))
