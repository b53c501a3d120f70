"""What layers with a random weight have in common: a posterior, a prior and a sampler."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    nearest,
    require_dtype,
    require_function,
    require_model,
    shown,
)
from zeromean.distributions.from_posterior import FromPosterior
from zeromean.distributions.gamma_prior import GammaPrior
from zeromean.distributions.noise import normal
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.posterior import (
    Posterior,
    PosteriorFactory,
    WeightLayout,
)
from zeromean.distributions.priors import ARD, LogUniform, Normal, Prior, StudentT
from zeromean.layers.stochastic_module import StochasticModule, own_sampler
from zeromean.registry import POSTERIORS, PRIORS, SAMPLERS
from zeromean.samplers.kinds import Draws, drawn_by, needs_normal_noise
from zeromean.samplers.linear_maps import LinearMap
from zeromean.samplers.outputs import local
from zeromean.samplers.random_bias import draw_with_bias
from zeromean.samplers.sampler import Sampler
from zeromean.samplers.weights import weight

PriorChoice = Prior | None | Literal["default"]
SamplerChoice = Sampler | Literal["default"]
BiasChoice = bool | PosteriorFactory | None


class StochasticLayer(StochasticModule):
    """A linear map with a random weight, and a bias that may be random too.

    Args:
        posterior: The distribution of the weight.
        bias_size: Shape or length of the bias, None for none.
        prior: What the KL term compares the posterior with, None for no KL term.
            Default: LogUniform() for normal noise, GammaPrior() for positive weights, None for
            other noise.
        sampler: How an output is drawn. Default: `zm.local` for normal noise, else `zm.weight`.
        bias: False for none, or the posterior of a random bias, which has the same prior.
    """

    torch_twin: Callable[..., Any]
    weight: Posterior
    bias: nn.Parameter | FactorizedPosterior | None

    def __init__(
        self,
        posterior: Posterior,
        bias_size: int | torch.Size | None,
        prior: PriorChoice,
        sampler: SamplerChoice,
        bias: BiasChoice = True,
    ):
        random = _random_bias(bias)
        super().__init__()
        self.weight = posterior
        self.prior = checked_prior(prior, posterior)
        self.sampler = checked_sampler(sampler, posterior)
        self.register_parameter("bias", None)
        if bias_size is None or not bias:
            return
        like = {"device": posterior.device, "dtype": posterior.dtype}
        self.bias = nn.Parameter(torch.empty(bias_size, **like))
        self._reset_bias()
        if random is not None:
            self.make_bias_random_(random)

    def make_bias_random_(self, posterior: PosteriorFactory) -> None:
        """Replace the bias by a posterior, which takes its values over."""
        values = self.bias
        assert isinstance(values, Tensor)
        # The range of its initial values is that of the weight.
        fan_in = self.weight.layout.fan_in or math.prod(self.weight.shape[1:])
        bias = build_posterior(
            posterior,
            values.shape,
            layout=WeightLayout(fan_in=fan_in, affine=True),
            device=values.device,
            dtype=values.dtype,
        )
        if not isinstance(bias, FactorizedPosterior):
            raise ValueError(
                f"A bias has independent numbers, got {type(bias).__name__}; use zm.Additive."
            )
        checked_prior(self.prior, bias)
        checked_sampler(self.sampler, bias)
        bias.set_weight_(values.detach())
        del self.bias
        self.bias = bias.requires_grad_(values.requires_grad)

    def linear_map(self) -> LinearMap:
        """The map that `forward` applies to the prepared input."""
        raise NotImplementedError

    def prepare(self, x: Tensor) -> Tensor:
        """Check an input and bring it into the form that the linear map takes."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        return self.draw(self.linear_map(), self.prepare(input))

    def draw(self, op: LinearMap, x: Tensor) -> Tensor:
        """The output of the map for a prepared input, drawn by the layer's sampler."""
        if isinstance(self.bias, FactorizedPosterior):
            return draw_with_bias(self.sampler, op, x, self.weight, self.bias)
        return self.sampler(op, x, self.weight, self.bias)

    def plain_twin(self) -> nn.Module:
        """torch's layer of the same geometry, on the meta device."""
        raise NotImplementedError

    @classmethod
    def from_torch(cls, module: Any, **options: Any) -> Self:
        """A layer of the geometry of torch's, with weights of its own.

        Args:
            options: The posterior, prior, sampler, device and dtype.
        """
        raise NotImplementedError

    def accepted_sampler(self, sampler: Sampler) -> Sampler:
        if drawn_by(sampler) is Draws.CHEAPER and not needs_normal_noise(own_sampler(self)):
            # What another sampler has trained may not be drawn in any other way.
            return own_sampler(self)
        if isinstance(self.bias, Posterior):
            checked_sampler(sampler, self.bias)
        return checked_sampler(sampler, self.weight)

    def distributions(self) -> dict[str, nn.Module]:
        random = {"weight": self.weight, "bias": self.bias}
        return {name: part for name, part in random.items() if isinstance(part, Posterior)}

    def kl_terms(self) -> dict[nn.Module, Callable[[], Tensor]]:
        if self.prior is None:
            return {}
        parts = self.distributions().values()
        return {p: partial(self.prior.kl, p) for p in parts if isinstance(p, Posterior)}

    def reset_parameters(self) -> None:
        self.weight.reset_parameters()
        self._reset_bias()

    def _reset_bias(self) -> None:
        if isinstance(self.bias, Posterior):
            self.bias.reset_parameters()
        elif self.bias is not None:
            bound = self.weight.initial_bound
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        random = isinstance(self.bias, Posterior)
        bias = f"bias={self.bias is not None}, " if not random else ""
        return f"{bias}prior={self.prior}, sampler={_name(self.sampler)}"


def _random_bias(bias: BiasChoice) -> PosteriorFactory | None:
    """The posterior of a random bias, None for one that is not."""
    if bias is None or isinstance(bias, bool):
        return None
    if not callable(bias):
        raise TypeError(
            "bias must be True or False, or the posterior of a random one such as zm.Additive, "
            f"got {shown(bias)}."
        )
    require_factory(bias)
    return bias


def checked_sampler(sampler: SamplerChoice, posterior: Posterior) -> Sampler:
    """The sampler, or an error where its theory does not cover the posterior."""
    independent = isinstance(posterior, FactorizedPosterior)
    if isinstance(sampler, str) and sampler == "default":
        return local if posterior.noise is normal and independent else weight
    require_function("sampler", sampler, nearest(sampler, SAMPLERS.shipped))
    assert not isinstance(sampler, str)
    if needs_normal_noise(sampler) and posterior.noise is not normal:
        raise ValueError(
            f"zm.local needs normal noise, got {_name(posterior.noise)}; use sampler=zm.weight, or "
            "zm.moment_matched for its normal approximation."
        )
    if not posterior.symmetric and drawn_by(sampler) is Draws.FLIPPED_WEIGHTS:
        raise ValueError(
            f"{_name(sampler)} flips signs, which needs symmetric noise, and that of "
            f"{type(posterior).__name__} is not; use sampler=zm.weight."
        )
    if not independent and drawn_by(sampler) is Draws.FLIPPED_WEIGHTS:
        raise ValueError(
            f"{_name(sampler)} flips signs as if weights were independent, which those of "
            f"{type(posterior).__name__} are not; use sampler=zm.weight or zm.local."
        )
    return sampler


def checked_prior(prior: PriorChoice, posterior: Posterior) -> Prior | None:
    """The prior, or an error where its KL does not cover the posterior."""
    independent = isinstance(posterior, FactorizedPosterior)
    if isinstance(prior, str) and prior == "default":
        if posterior.noise is not normal:
            return GammaPrior() if posterior.positive else None
        return LogUniform() if independent else Normal()
    if prior is None:
        return None
    if isinstance(prior, type) or not isinstance(prior, Prior):
        raise TypeError(
            f"prior must have a method kl(posterior), got {shown(prior)}; use {_prior_hint(prior)}."
        )
    if isinstance(prior, FromPosterior):
        raise ValueError(
            "zm.FromPosterior is a posterior from before, which a new layer does not have; build "
            "it with another prior, and call zm.become_prior_(model) when it has been trained."
        )
    if posterior.positive != getattr(prior, "positive", False):
        kinds = "positive weights", "weights of both signs"
        theirs, ours = kinds if posterior.positive else reversed(kinds)
        raise ValueError(
            f"The KL of {prior} is for {ours}, and {type(posterior).__name__} has {theirs}; use "
            f"{'zm.GammaPrior()' if posterior.positive else 'zm.Normal()'} or prior=None."
        )
    if posterior.noise is not normal and not posterior.positive:
        raise ValueError(
            f"The KL of {prior} needs normal noise, got {_name(posterior.noise)}; use prior=None."
        )
    if not independent and isinstance(prior, (LogUniform, StudentT, ARD)):
        raise ValueError(
            f"The KL of {prior} is for independent weights, which those of "
            f"{type(posterior).__name__} are not; use zm.Normal()."
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
        pass  # A function written in C may have no signature.
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
            f"{shown(factory)}; use {nearest(factory, POSTERIORS.shipped)}."
        )


def stochastic_layers(model: nn.Module) -> dict[str, StochasticLayer]:
    """The layers with one random weight by name, shared ones once: not LSTM and GRU."""
    require_model(model)
    return {n: m for n, m in model.named_modules() if isinstance(m, StochasticLayer)}


def _prior_hint(prior: Any) -> str:
    if isinstance(prior, type) and isinstance(prior, Prior):
        return f"an instance: {prior.__name__}()"
    names = [name for name in PRIORS.shipped if PRIORS[name] is not FromPosterior]
    found = nearest(prior, names)
    return f"{found}()" if " or " not in found else "zm." + "(), zm.".join(names) + "() or None"


def _name(function: Any) -> str:
    return getattr(function, "__name__", repr(function))
