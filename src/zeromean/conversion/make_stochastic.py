"""From deterministic models to stochastic ones, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils import prune as torch_prune

from zeromean.arguments import FLOATING, require_model, require_predicate, shown
from zeromean.conversion.twins import (
    has_several_weights,
    has_twin,
    is_norm,
    multi_weight_twin,
    stochastic_twin,
    weights_of,
)
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.posterior import Posterior, PosteriorFactory
from zeromean.layers.dropout.input_noise import input_noise_of
from zeromean.layers.stochastic_layer import PriorChoice, SamplerChoice, require_factory
from zeromean.layers.stochastic_module import StochasticModule
from zeromean.layers.surgery import replace_modules_

Predicate = Callable[[str, nn.Module], bool]
# σ = 1.8% of each weight: the means predict as before, and fine-tuning finds how much noise the
# data allow.
DEFAULT_POSTERIOR = partial(Additive, log_alpha=-8.0)
# Noise over signal of a layer's weights from which on predictions may not be what they were.
MUCH_NOISE = 0.1


@dataclass(frozen=True)
class Conversion:
    """What `make_stochastic_` did.

    Attributes:
        converted: Names of the layers that are stochastic now.
        left: Names of the other modules with parameters of their own, and why they were left.
        noise: By name of a converted layer, √(Σσ² / Σμ²) of its weights: how large the noise is
            that predictions have now. Infinite for zero-mean layers, which forget what they knew.
            Layers on the meta device have none.
    """

    converted: list[str]
    left: dict[str, str]
    noise: dict[str, float] = field(default_factory=dict)

    @property
    def keeps_predictions(self) -> bool:
        """Whether predictions are what they were, up to little noise."""
        return all(noise <= MUCH_NOISE for noise in self.noise.values())

    def __str__(self) -> str:
        lines = [f"converted {name}{self._effect(name)}" for name in self.converted]
        return "\n".join([*lines, *(f"left {name}: {why}" for name, why in self.left.items())])

    def _effect(self, name: str) -> str:
        noise = self.noise.get(name)
        if noise is None:
            return ""
        if math.isinf(noise):
            return ": its mean is zero, so that training starts over; train before you predict"
        changes = "" if noise <= MUCH_NOISE else ", which changes predictions: train the model"
        return f": noise {noise:.2g} of its weights{changes}"


def make_stochastic_(
    model: nn.Module,
    *,
    posterior: PosteriorFactory | None = None,
    prior: PriorChoice = "default",
    sampler: SamplerChoice = "default",
    biases: bool | PosteriorFactory = False,
    norms: bool | PosteriorFactory = False,
    where: Predicate | None = None,
) -> Conversion:
    """Replace layers by their stochastic twins, in place. Trained weights become means.

    Predictions stay what they were, up to noise of 2% of each weight; how much noise the data
    allow is what training on with the KL term finds out. `posterior=zm.ZeroMean` has no means:
    magnitudes of weights become scales, their signs are lost, and the model has to be trained
    again. The report says how large the noise of each layer is and whether predictions change.

    A weight that several layers share becomes one posterior that they share, and its KL counts
    once. nn.MultiheadAttention is converted as a whole, its output projection with it. LSTM and GRU
    draw their weights once for a sequence, whatever the sampler. A model with `save_pretrained`
    (Hugging Face's) refuses it from now on, as posteriors would be lost: use `zm.save`.

    Args:
        posterior: What q(W) becomes: a class, or a `functools.partial` of one. Default: Additive,
            with initial noise relative to each weight (`partial(zm.Additive, log_alpha=-8.0)`).
        prior: Prior of every converted layer.
        sampler: Sampler of every converted layer.
        biases: Make the biases of converted layers random too: True for little noise, as the
            default of `posterior`, or a posterior. Those of LSTM, GRU and attention stay as they
            are.
        norms: The same for scales and shifts of BatchNorm, LayerNorm and GroupNorm, which are
            left alone by default.
        where: Predicate of name and module that selects the layers. Default: all that have a twin.
    """
    require_model(model)
    require_predicate(where)
    if posterior is not None:
        require_factory(posterior)
    bias_posterior = _of_affine("biases", biases)
    norm_posterior = _of_affine("norms", norms)
    if has_twin(model):
        raise ValueError(
            f"The model is itself a {type(model).__name__}, which cannot be replaced in place; "
            f"wrap it in nn.Sequential, or build a zm.{type(model).__name__}."
        )
    selected, left = _select(model, where, with_norms=norm_posterior is not None)
    _refuse_broken_ties(model, set(selected.values()))
    # Build everything before anything is replaced, so that an error leaves the model as it was.
    twins: dict[nn.Module, nn.Module] = {}
    posteriors: dict[Any, Posterior] = {}
    posterior = DEFAULT_POSTERIOR if posterior is None else posterior
    noise: dict[str, float] = {}
    for name, module in selected.items():
        if has_several_weights(module):
            twins[module] = twin = multi_weight_twin(module, posterior, prior, sampler, posteriors)
        else:
            tied = posteriors.get(module.weight)
            kind = norm_posterior if is_norm(module) else posterior
            assert kind is not None
            twins[module] = twin = stochastic_twin(
                name, module, kind, prior, sampler, tied=tied, bias=bias_posterior
            )
            posteriors[module.weight] = twin.weight
        _refuse_lost_signs(name, module, twin)
        ratio = _noise_over_signal(twin)
        if ratio is not None:
            noise[name] = ratio
    replace_modules_(model, twins)
    return Conversion(list(selected), left, noise)


def _of_affine(name: str, choice: bool | PosteriorFactory) -> PosteriorFactory | None:
    """The posterior of biases or norms, None where they stay as they are."""
    if isinstance(choice, bool):
        return DEFAULT_POSTERIOR if choice else None
    if not callable(choice):
        raise TypeError(
            f"{name} must be True, False or a posterior such as zm.Additive, got {shown(choice)}."
        )
    require_factory(choice)
    return choice


@torch.no_grad()
def _noise_over_signal(layer: StochasticModule) -> float | None:
    """√(Σσ² / Σμ²) of all weights of a layer; None on the meta device."""
    noise = signal = 0.0
    for part in layer.distributions().values():
        if not isinstance(part, Posterior):
            continue
        if part.device.type == "meta":
            return None
        mean, variance = part.moments()
        noise += variance.float().sum().item()
        signal += 0.0 if mean is None else mean.float().square().sum().item()
    return math.sqrt(noise / signal) if signal else math.inf if noise else 0.0


def _select(
    model: nn.Module, where: Predicate | None, *, with_norms: bool
) -> tuple[dict[str, Any], dict[str, str]]:
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
        if is_norm(module) and not with_norms:
            left[name or "the model"] = f"{type(module).__name__} is converted with norms=True"
            continue
        reason = _reason_to_leave(name, module, where, module in reads_weights)
        if reason is None:
            selected[name] = module
            parts.update(module.modules())
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
    if not has_twin(module):
        return f"{kind} has no stochastic twin"
    if input_noise_of(module) is not None:
        return "it reads its inputs with noise on units; make layers stochastic before that"
    weights = weights_of(module)
    if is_norm(module) and module._parameters.get("weight") is None:
        return "it has no affine parameters"
    if not all(isinstance(weight, nn.Parameter) for weight in weights):
        return "its weight is not a parameter (an old weight_norm?); remove the hook first"
    if any(weight.dtype not in FLOATING for weight in weights):
        return f"weights of {weights[0].dtype} have no stochastic twin"
    if torch_prune.is_pruned(module):
        return "torch.nn.utils.prune has masked its bias; call its prune.remove first"
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


def _refuse_lost_signs(name: str, module: nn.Module, twin: StochasticModule) -> None:
    """Refuse positive weights in place of negative ones."""
    parts = twin.distributions().values()
    positive = next((p for p in parts if isinstance(p, Posterior) and p.positive), None)
    weights = weights_of(module)
    if positive is not None and any(not w.is_meta and (w < 0).any() for w in weights):
        raise ValueError(
            f"{name} has negative weights, and those of {type(positive).__name__} are positive; "
            "leave the layer out by where=, or use zm.Additive."
        )


def _refuse_broken_ties(model: nn.Module, selected: set[Any]) -> None:
    weights = {weight for module in selected for weight in weights_of(module)}
    converted = {part for module in selected for part in module.modules()}
    for name, module in model.named_modules():
        if module not in converted and any(p in weights for p in module._parameters.values()):
            raise ValueError(
                f"{name or 'The model'} shares its weight with a layer to convert but is not "
                "converted itself; select both, neither, or untie them first."
            )
