"""From deterministic models to stochastic ones, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils import prune as torch_prune

from zeromean.layers import PriorChoice, SamplerChoice
from zeromean.module_surgery import copy_with_masks, replace_modules_
from zeromean.posteriors import Additive, Posterior, PosteriorFactory, ZeroMean
from zeromean.stochastic import StochasticModule, stochastic_modules
from zeromean.twins import (
    has_twin,
    plain_module,
    recurrent_twin,
    stochastic_twin,
    weights_of,
)

Predicate = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Conversion:
    """What `make_stochastic_` did.

    Attributes:
        converted: Names of the layers that are stochastic now.
        left: Names of the other modules with parameters of their own, and why they were left.
    """

    converted: list[str]
    left: dict[str, str]

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
    if has_twin(model):
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


def to_deterministic(model: nn.Module, weights: Literal["mean", "sample"] = "mean") -> nn.Module:
    """A copy of the model with plain torch layers in place of the stochastic ones.

    Args:
        weights: "mean" takes the mean of every weight (the weight scaling rule); "sample" draws
            the weights once, which gives one member of the ensemble. A zero-mean layer has only
            the latter: all its means are zero. Noise on units becomes fixed multipliers alike.
    """
    if weights not in ("mean", "sample"):
        raise ValueError(f"weights must be 'mean' or 'sample', got {weights!r}.")
    model = copy_with_masks(model)
    drawn: dict[Posterior, nn.Parameter] = {}
    plain: dict[nn.Module, nn.Module] = {
        module: plain_module(name or "the model", module, weights, drawn)
        for name, module in stochastic_modules(model).items()
    }
    return replace_modules_(model, plain)


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
    if not has_twin(module):
        return f"{kind} has no stochastic twin"
    weights = weights_of(module)
    if not all(isinstance(weight, nn.Parameter) for weight in weights):
        return "its weight is not a parameter (an old weight_norm?); remove the hook first"
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


def _refuse_broken_ties(model: nn.Module, selected: set[Any]) -> None:
    weights = {weight for module in selected for weight in weights_of(module)}
    for name, module in model.named_modules():
        if module not in selected and any(p in weights for p in module._parameters.values()):
            raise ValueError(
                f"{name or 'The model'} shares its weight with a layer to convert but is not "
                "converted itself; select both, neither, or untie them first."
            )
