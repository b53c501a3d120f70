"""From deterministic models to stochastic ones, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zeromean.convolutions import Conv1d, Conv2d, Conv3d, ConvTranspose2d
from zeromean.dropout import UnitNoise, UnitScale
from zeromean.layers import Embedding, Linear, PriorChoice, SamplerChoice, StochasticLayer
from zeromean.module_surgery import replace_modules_
from zeromean.objectives import stochastic_modules
from zeromean.posteriors import (
    Additive,
    Multiplicative,
    Posterior,
    PosteriorFactory,
    WeightLayout,
    ZeroMean,
)
from zeromean.recurrent import GRU, LSTM, RecurrentLayer
from zeromean.stochastic import StochasticModule

Predicate = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Conversion:
    """What `make_stochastic_` did.

    Attributes:
        converted: Names of the layers that are stochastic now.
        left: Names of the other modules with parameters of their own, and why they were left.
    """

    converted: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"converted {name}" for name in self.converted]
        return "\n".join([*lines, *(f"left {name}: {why}" for name, why in self.left.items())])


def make_stochastic_(
    model: nn.Module,
    *,
    posterior: PosteriorFactory | None = None,
    prior: PriorChoice = "default",
    sampler: SamplerChoice = "default",
    where: Predicate | None = None,
) -> Conversion:
    """Replace layers by their stochastic twins, in place. Trained weights become means.

    Not so with the default, ZeroMean: their magnitudes become scales, their signs are lost, and the
    model has to be trained again. To keep what it knows, say `posterior=zm.Multiplicative` or
    `zm.Additive`, with the initial noise in `partial(zm.Additive, log_variance=-8.0)`.

    A weight that several layers share becomes one posterior that they share, and its KL counts
    once. Modules that read the weights of their children themselves (nn.MultiheadAttention) are
    left alone. LSTM and GRU draw their weights once for a sequence, whatever the sampler.

    Args:
        posterior: What q(W) becomes: a class, or a `functools.partial` of one. Default: ZeroMean,
            and Additive for LSTM and GRU, as zero-mean gates do not learn.
        prior: Prior of every converted layer.
        sampler: Sampler of every converted layer.
        where: Predicate of name and module that selects the layers. Default: all that have a twin.
    """
    if type(model) in (*_TWINS, *_RECURRENT_TWINS):
        raise ValueError(
            f"The model is itself a {type(model).__name__}, which cannot be replaced in place; "
            f"wrap it in nn.Sequential, or build a zm.{type(model).__name__}."
        )
    selected, left = _select(model, where)
    _refuse_broken_ties(model, set(selected.values()))
    # Build everything before anything is replaced, so that an error leaves the model as it was.
    twins: dict[nn.Module, nn.Module] = {}
    posteriors: dict[Any, Posterior] = {}
    for name, module in selected.items():
        if isinstance(module, nn.RNNBase):
            twins[module] = recurrent_twin(module, posterior or Additive, prior, posteriors)
            continue
        tied = posteriors.get(module.weight)
        twins[module] = twin = stochastic_twin(
            name, module, posterior or ZeroMean, prior, sampler, tied
        )
        posteriors[module.weight] = twin.weight
    replace_modules_(model, twins)
    return Conversion(list(selected), left)


def to_deterministic(model: nn.Module, weights: str = "mean") -> nn.Module:
    """A copy of the model with plain torch layers in place of the stochastic ones.

    Args:
        weights: "mean" takes the mean of every weight (the weight scaling rule); "sample" draws
            the weights once, which gives one member of the ensemble. A zero-mean layer has only
            the latter: all its means are zero. Noise on units becomes fixed multipliers alike.
    """
    if weights not in ("mean", "sample"):
        raise ValueError(f"weights must be 'mean' or 'sample', got {weights!r}.")
    model = copy.deepcopy(model)
    drawn: dict[Posterior, nn.Parameter] = {}
    plain: dict[nn.Module, nn.Module] = {
        module: _plain_module(name or "the model", module, weights, drawn)
        for name, module in stochastic_modules(model).items()
    }
    if model in plain:
        return plain[model]
    replace_modules_(model, plain)
    return model


def plain_layer(
    name: str, layer: StochasticLayer, weights: str, drawn: dict[Posterior, nn.Parameter]
) -> nn.Module:
    """torch's twin of a stochastic layer, with its mean weight or a drawn one.

    Args:
        drawn: The weights so far, for layers that share a posterior.
    """
    plain = layer.plain_twin()
    plain.weight = _plain_weight(name, layer.weight, weights, drawn)
    if layer.bias is not None:
        plain.bias = layer.bias
    return _take_over_(plain, layer)


def plain_recurrent(
    name: str, layer: RecurrentLayer, weights: str, drawn: dict[Posterior, nn.Parameter]
) -> nn.RNNBase:
    """torch's twin of a recurrent layer, in the same way."""
    plain = layer.plain_twin()
    for weight_name, posterior in layer.posteriors().items():
        parameter = _plain_weight(f"{name}.{weight_name}", posterior, weights, drawn)
        setattr(plain, weight_name, parameter)
    for bias_name, bias in layer.named_parameters(recurse=False):
        setattr(plain, bias_name, bias)
    plain.flatten_parameters()
    return _take_over_(plain, layer)


def _plain_module(
    name: str, module: StochasticModule, weights: str, drawn: dict[Posterior, nn.Parameter]
) -> nn.Module:
    if isinstance(module, StochasticLayer):
        return plain_layer(name, module, weights, drawn)
    if isinstance(module, RecurrentLayer):
        return plain_recurrent(name, module, weights, drawn)
    if isinstance(module, UnitNoise):
        return _take_over_(UnitScale(_plain_scale(module, weights)), module)
    raise TypeError(f"{name} is a {type(module).__name__}, which has no plain twin.")


def _plain_scale(noise: UnitNoise, weights: str) -> Tensor:
    with torch.no_grad():
        return noise.mean_scale() if weights == "mean" else noise.sample_scale(1).squeeze(0)


def _plain_weight(
    name: str, posterior: Posterior, weights: str, drawn: dict[Posterior, nn.Parameter]
) -> nn.Parameter:
    if weights == "mean" and not posterior.has_mean:
        raise ValueError(
            f"{name} is a zero-mean layer: with its means it would put out a constant; "
            "use weights='sample' for one network of the ensemble, or predict with the samples of "
            "zm.predict_proba."
        )
    if posterior not in drawn:
        with torch.no_grad():
            mean, _ = posterior.mean_and_scale()
            weight = posterior.sample() if mean is None or weights == "sample" else mean.clone()
        learns = any(parameter.requires_grad for parameter in posterior.parameters())
        drawn[posterior] = nn.Parameter(weight, requires_grad=learns)
    return drawn[posterior]


def _select(model: nn.Module, where: Predicate | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The modules to convert by name, and the reason why each other one is left."""
    selected: dict[str, Any] = {}
    left: dict[str, str] = {}
    parts: set[nn.Module] = set()  # Modules that belong to one that is reported already.
    reads_weights: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in parts:
            continue
        if isinstance(module, StochasticModule):
            left[name or "the model"] = "already stochastic"
            parts.update(module.modules())
            continue
        if isinstance(module, nn.MultiheadAttention):
            reads_weights.update(module.children())
        if parametrize.is_parametrized(module):
            parts.update(module.get_submodule("parametrizations").modules())
        elif not module._parameters:
            continue
        reason = _reason_to_leave(name, module, where, module in reads_weights)
        if reason is None:
            selected[name] = module
        else:
            left[name or "the model"] = reason
    if not selected:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items()) or "no parameters"
        raise ValueError(
            f"Nothing to convert: no layer with a stochastic twin was selected ({reasons}); "
            "check where=."
        )
    return selected, left


def _reason_to_leave(
    name: str, module: Any, where: Predicate | None, weight_read_by_parent: bool
) -> str | None:
    kind = type(module).__name__
    if weight_read_by_parent:
        return "nn.MultiheadAttention reads its weight directly"
    if parametrize.is_parametrized(module):
        return "its weight is parametrized; remove the parametrization first"
    if type(module) not in (*_TWINS, *_RECURRENT_TWINS):
        return f"{kind} has no stochastic twin"
    weights = _weights(module)
    if not all(isinstance(weight, nn.Parameter) for weight in weights):
        return "its weight is not a parameter (an old weight_norm?); remove the hook first"
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    ):
        return "Embedding with max_norm, sparse or scale_grad_by_freq has no stochastic twin"
    if isinstance(module, nn.RNNBase) and module.proj_size > 0:
        return "LSTM with proj_size has no stochastic twin"
    if where is not None and not where(name, module):
        return "not selected"
    if any(not weight.is_meta and not weight.isfinite().all() for weight in weights):
        raise ValueError(
            f"The weight of {name} must be finite, got NaN or infinite values; load a sound "
            "checkpoint before converting."
        )
    return None


def _weights(module: nn.Module) -> list[Any]:
    """The weights of a layer that become random; None for what should be a parameter and is not."""
    names = ["weight"]
    if isinstance(module, nn.RNNBase):
        names = [n for n in module._flat_weights_names if n.startswith("weight_")]
    return [module._parameters.get(name) for name in names]


def _refuse_broken_ties(model: nn.Module, selected: set[Any]) -> None:
    weights = {weight for module in selected for weight in _weights(module)}
    for name, module in model.named_modules():
        if module not in selected and any(p in weights for p in module._parameters.values()):
            raise ValueError(
                f"{name or 'The model'} shares its weight with a layer to convert but is not "
                "converted itself; select both, neither, or untie them first."
            )


def stochastic_twin(
    name: str,
    module: Any,
    posterior: PosteriorFactory,
    prior: PriorChoice,
    sampler: SamplerChoice,
    tied: Posterior | None = None,
) -> StochasticLayer:
    """The stochastic twin of a torch layer, with its weight, its bias, its hooks and its mode."""

    def factory(shape: torch.Size, **options: Any) -> Posterior:
        if tied is not None:
            _share_layout_(name, tied, options.get("layout", WeightLayout()))
            return tied
        distribution = posterior(shape, **options)
        distribution.set_weight_(module.weight)
        return distribution.requires_grad_(module.weight.requires_grad)

    place = {"device": module.weight.device, "dtype": module.weight.dtype}
    layer = _TWINS[type(module)](module, posterior=factory, prior=prior, sampler=sampler, **place)
    if layer.bias is not None:
        layer.bias = module.bias
    return _take_over_(layer, module)


def recurrent_twin(
    module: nn.RNNBase,
    posterior: PosteriorFactory,
    prior: PriorChoice,
    posteriors: dict[Any, Posterior],
) -> RecurrentLayer:
    """The same for LSTM and GRU, whose weights are added to the `posteriors` so far."""
    like = _weights(module)[0]
    layer = _RECURRENT_TWINS[type(module)](
        module.input_size,
        module.hidden_size,
        module.num_layers,
        module.bias,
        module.batch_first,
        module.dropout,
        module.bidirectional,
        posterior=posterior,
        prior=prior,
        device=like.device,
        dtype=like.dtype,
    )
    for name, distribution in layer.posteriors().items():
        weight = module.get_parameter(name)
        if weight not in posteriors:
            distribution.set_weight_(weight)
            posteriors[weight] = distribution.requires_grad_(weight.requires_grad)
        setattr(layer, name, posteriors[weight])
    for name, _ in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, module.get_parameter(name))
    return _take_over_(layer, module)


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


def _convolution_twin(layer: Callable[..., StochasticLayer]) -> Callable[..., StochasticLayer]:
    def build(module: nn.modules.conv._ConvNd, **options: Any) -> StochasticLayer:
        if module.transposed:
            options["output_padding"] = module.output_padding
        return layer(
            module.in_channels,
            module.out_channels,
            module.kernel_size,
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=module.groups,
            bias=module.bias is not None,
            padding_mode=module.padding_mode,
            **options,
        )

    return build


def _linear_twin(module: nn.Linear, **options: Any) -> Linear:
    return Linear(module.in_features, module.out_features, module.bias is not None, **options)


def _embedding_twin(module: nn.Embedding, **options: Any) -> Embedding:
    return Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx, **options)


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

_TWINS: dict[Any, Callable[..., StochasticLayer]] = {
    nn.Linear: _linear_twin,
    nn.Embedding: _embedding_twin,
    **{layer.torch_twin: _convolution_twin(layer) for layer in (Conv1d, Conv2d, Conv3d)},
    nn.ConvTranspose2d: _convolution_twin(ConvTranspose2d),
}

_RECURRENT_TWINS: dict[Any, type[RecurrentLayer]] = {nn.LSTM: LSTM, nn.GRU: GRU}
