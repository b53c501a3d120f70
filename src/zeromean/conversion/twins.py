"""The stochastic twin of a plain layer, and the plain twin of a stochastic one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.multiplicative import Multiplicative
from zeromean.distributions.posteriors.posterior import Posterior, PosteriorFactory, WeightLayout
from zeromean.layers.dropout.unit_noise import UnitNoise, UnitScale
from zeromean.layers.multi_weight_layer import MultiWeightLayer
from zeromean.layers.norm import StochasticNorm
from zeromean.layers.stochastic_layer import (
    PriorChoice,
    SamplerChoice,
    StochasticLayer,
    build_posterior,
)
from zeromean.layers.stochastic_module import StochasticModule
from zeromean.registry import LAYERS


def has_twin(module: nn.Module) -> bool:
    """Whether a module of this very class has a stochastic twin."""
    return type(module) in _layers_by_twin()


def has_several_weights(module: Any) -> bool:
    """Whether the twin of a torch layer is one with several random weights."""
    twin = _layers_by_twin().get(type(module))
    return isinstance(twin, type) and issubclass(twin, MultiWeightLayer)


def stochastic_twin(
    name: str,
    module: Any,
    posterior: PosteriorFactory,
    prior: PriorChoice,
    sampler: SamplerChoice,
    *,
    kind: type[StochasticLayer] | None = None,
    tied: Posterior | None = None,
    bias: PosteriorFactory | None = None,
) -> StochasticLayer:
    """The stochastic twin of a torch layer, with its weight, its bias, its hooks and its mode.

    Args:
        bias: The posterior of a random bias. Default: it stays a parameter. The shift of a norm
            has the posterior of its scale.
        kind: The class of the twin, where several have the same torch layer. Default: the first.
        tied: The posterior of another layer, which this one shares.
    """

    if is_norm(module):
        return _norm_twin(module, posterior, prior, sampler)

    def factory(shape: torch.Size, **options: Any) -> Posterior:
        if tied is not None:
            _share_layout_(name, tied, options.get("layout", WeightLayout()))
            return tied
        distribution = build_posterior(posterior, shape, **options)
        distribution.set_weight_(module.weight)
        return distribution.requires_grad_(module.weight.requires_grad)

    place = {"device": module.weight.device, "dtype": module.weight.dtype}
    layer = (kind or _layers_by_twin()[type(module)]).from_torch(
        module, posterior=factory, prior=prior, sampler=sampler, **place
    )
    if layer.bias is not None:
        layer.bias = module.bias
        if bias is not None:
            layer.make_bias_random_(bias)
    return _take_over_(layer, module)


def _norm_twin(
    module: Any, posterior: PosteriorFactory, prior: PriorChoice, sampler: SamplerChoice
) -> StochasticNorm:
    place = {"device": module.weight.device, "dtype": module.weight.dtype}
    layer: StochasticNorm = _layers_by_twin()[type(module)].from_torch(
        module, posterior=posterior, prior=prior, sampler=sampler, **place
    )
    for random, values in ((layer.weight, module.weight), (layer.bias, module.bias)):
        if isinstance(random, Posterior):
            random.set_weight_(values.detach())
            random.requires_grad_(values.requires_grad)
    return _take_over_(layer, module)


def is_norm(module: nn.Module) -> bool:
    """Whether the twin of a torch layer is a norm."""
    twin = _layers_by_twin().get(type(module))
    return isinstance(twin, type) and issubclass(twin, StochasticNorm)


def multi_weight_twin(
    module: Any,
    posterior: PosteriorFactory,
    prior: PriorChoice,
    sampler: SamplerChoice,
    posteriors: dict[Any, Posterior],
) -> MultiWeightLayer:
    """The same for layers with several weights, which are added to the `posteriors` so far."""
    like = weights_of(module)[0]
    layer: MultiWeightLayer = _layers_by_twin()[type(module)].from_torch(
        module,
        posterior=posterior,
        prior=prior,
        sampler=sampler,
        device=like.device,
        dtype=like.dtype,
    )
    for name, distribution in layer.posteriors().items():
        weight = module.get_parameter(name)
        if weight not in posteriors:
            distribution.set_weight_(weight)
            posteriors[weight] = distribution.requires_grad_(weight.requires_grad)
        _put_(layer, name, posteriors[weight])
    for name in layer.biases():
        _put_(layer, name, module.get_parameter(name))
    return _take_over_(layer, module)


def _put_(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module, or of one inside it."""
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, value)


def _layers_by_twin() -> dict[Any, Any]:
    """The layer of each torch layer that was registered first: ours, where there are several."""
    return {layer.torch_twin: layer for layer in reversed(list(LAYERS.values()))}


def weights_of(module: nn.Module) -> list[Any]:
    """The weights of a layer that become random; None for what should be a parameter and is not."""
    if isinstance(module, nn.MultiheadAttention):
        separate = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        names = ["in_proj_weight"] if module._qkv_same_embed_dim else separate
        parameters = [module._parameters.get(name) for name in names]
        return [*parameters, module.out_proj._parameters.get("weight")]
    names = ["weight"]
    if isinstance(module, nn.RNNBase):
        names = [n for n in module._flat_weights_names if n.startswith("weight_")]
    return [module._parameters.get(name) for name in names]


def plain_module(
    name: str, module: StochasticModule, weights: str, drawn: dict[Any, nn.Parameter]
) -> nn.Module:
    """torch's twin of anything stochastic, with its mean weights or drawn ones.

    Args:
        weights: "mean" or "sample".
        drawn: The weights so far, for layers that share a posterior.
    """
    if isinstance(module, StochasticLayer):
        return plain_layer(name, module, weights, drawn)
    if isinstance(module, MultiWeightLayer):
        return plain_multi_weight(name, module, weights, drawn)
    if isinstance(module, UnitNoise):
        return _take_over_(UnitScale(_plain_scale(module, weights)), module)
    raise TypeError(f"{name} is a {type(module).__name__}, which has no plain twin.")


def plain_layer(
    name: str, layer: StochasticLayer, weights: str, drawn: dict[Any, nn.Parameter]
) -> nn.Module:
    """torch's twin of a layer with one random weight."""
    plain = layer.plain_twin()
    plain.weight = _plain_weight(name, layer.weight, weights, drawn)
    if isinstance(layer.bias, Posterior):
        plain.bias = _plain_weight(f"{name}.bias", layer.bias, weights, drawn)
    elif layer.bias is not None:
        plain.bias = layer.bias
    return _take_over_(plain, layer)


def plain_multi_weight(
    name: str, layer: MultiWeightLayer, weights: str, drawn: dict[Any, nn.Parameter]
) -> nn.Module:
    """torch's twin of a layer with several random weights."""
    plain = layer.plain_twin()
    for weight_name, posterior in layer.posteriors().items():
        parameter = _plain_weight(f"{name}.{weight_name}", posterior, weights, drawn)
        _put_(plain, weight_name, parameter)
    for bias_name, bias in layer.biases().items():
        _put_(plain, bias_name, bias)
    if isinstance(plain, nn.RNNBase):
        plain.flatten_parameters()
    return _take_over_(plain, layer)


def _plain_scale(noise: UnitNoise, weights: str) -> Tensor:
    with torch.no_grad():
        return noise.mean_scale() if weights == "mean" else noise.sample_scale(1).squeeze(0)


def _plain_weight(
    name: str, posterior: Posterior, weights: str, drawn: dict[Any, nn.Parameter]
) -> nn.Parameter:
    if weights == "mean" and not posterior.has_mean:
        raise ValueError(
            f"{name} is a zero-mean layer: with its means it would return a constant; "
            "use weights='sample' for one network of the ensemble, or predict with the samples of "
            "zm.predict_proba."
        )
    key = _weight_key(posterior, weights)
    if key not in drawn:
        with torch.no_grad():
            mean = posterior.mean_weight() if weights == "mean" else None
            weight = posterior.sample() if mean is None else mean.clone()
        learns = any(parameter.requires_grad for parameter in posterior.parameters())
        drawn[key] = nn.Parameter(weight, requires_grad=learns)
    return drawn[key]


def _weight_key(posterior: Posterior, weights: str) -> nn.Module | nn.Parameter:
    """What stands for a weight: posteriors that share their means have one mean weight."""
    tied = type(posterior) in (Additive, Multiplicative) and posterior.mask is None
    return posterior.get_parameter("mean") if tied and weights == "mean" else posterior


def _share_layout_(name: str, tied: Posterior, layout: WeightLayout) -> None:
    """Let a posterior serve one more layer, which reads its tensor in its own way."""
    by_neuron = isinstance(tied, Multiplicative) and tied.share == "neuron"
    if by_neuron and tied.layout.neuron_dim != layout.neuron_dim:
        raise ValueError(
            f"{name} shares its weight with a layer whose output units lie along another "
            "dimension, so share='neuron' has no meaning; use share='layer' or 'weight'."
        )
    rows = {tied.layout.noiseless_row, layout.noiseless_row} - {None}
    if len(rows) > 1:
        raise ValueError(
            f"{name} shares its weight with an Embedding of another padding_idx; use one for both."
        )
    tied.layout = replace(tied.layout, noiseless_row=next(iter(rows), None))


def _take_over_(new: Any, old: nn.Module) -> Any:
    """Give a module the mode and the hooks of the one that it replaces."""
    for hooks in _HOOKS:
        # The dict itself, so that the handles of the hooks can still remove them.
        setattr(new, hooks, getattr(old, hooks))
    return new.train(old.training)


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
