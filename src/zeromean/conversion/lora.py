"""Low-rank adapters for a trained model, with random weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import nn

from zeromean.arguments import (
    FLOATING,
    require_integer,
    require_model,
    require_numbers,
    require_predicate,
)
from zeromean.conversion.make_stochastic import DEFAULT_POSTERIOR, Conversion, Predicate
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.posterior import PosteriorFactory
from zeromean.layers.lora import LoraLinear
from zeromean.layers.stochastic_layer import PriorChoice, SamplerChoice, require_factory
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.layers.surgery import replace_modules_


def add_lora_(
    model: nn.Module,
    rank: int = 8,
    *,
    alpha: float | None = None,
    where: Predicate | None = None,
    posterior: PosteriorFactory | None = None,
    prior: PriorChoice = "default",
    sampler: SamplerChoice = "default",
) -> Conversion:
    """Freeze a model and add low-rank adapters with random weights to its dense layers, in place.

    A layer W x becomes W x + alpha / rank · B A x. B starts at zero, so that predictions are what
    they were up to a little noise, and the KL is that of A and B alone. Layers that have to be
    trained as a whole (a new head) are left out by `where` and switched on again afterwards:
    `model.classifier.requires_grad_(True)`. `zm.prune_lora_` finds out how much of the rank the
    data ask for, and `zm.to_deterministic` puts what was learned into plain weights. To load what
    `zm.save` wrote, add the same adapters to the plain model first.

    Args:
        rank: Columns of B, and rows of A.
        alpha: LoRA's scale of the adapter: not the α of the noise. Default: rank.
        where: Predicate of name and module that selects the layers. Default: every nn.Linear, and
            Conv1D of Hugging Face's GPT-2.
        posterior: What q(A) and q(B) are, with means. Default: Additive, with noise of 2% of
            the weights of A, and in B of as much as is 2% of the layer's weights.
        prior: Prior of A and B.
        sampler: Sampler of A and B.
    """
    require_model(model)
    require_predicate(where)
    rank = require_integer("rank", rank, at_least=1)
    alpha = rank if alpha is None else alpha
    require_numbers(alpha=alpha)
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be a positive number, got {alpha}.")
    if posterior is not None:
        require_factory(posterior)
    if stochastic_modules(model):
        raise ValueError(
            "The model is stochastic already, and adapters are for a plain one; start from "
            "zm.to_deterministic(model)."
        )
    if _reason_to_leave("", model, None, False) is None:
        raise ValueError("The model is itself one layer; wrap it in nn.Sequential.")
    adapters: dict[nn.Module, nn.Module] = {}
    converted: list[str] = []
    left: dict[str, str] = {}
    noise: dict[str, float] = {}
    read = {
        child
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
    }
    for name, module in model.named_modules():
        if not module._parameters:
            continue
        reason = _reason_to_leave(name, module, where, module in read)
        if reason is not None:
            left[name or "the model"] = reason
            continue
        adapters[module] = layer = LoraLinear(
            module,
            rank,
            alpha,
            posteriors=(posterior, posterior)
            if posterior is not None
            else (DEFAULT_POSTERIOR, _little_noise(module, rank, alpha / rank)),
            prior=prior,
            sampler=sampler,
        )
        converted.append(name)
        if not module.weight.is_meta:
            noise[name] = _noise(layer)
    if not adapters:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items()) or "no parameters"
        raise ValueError(f"No layer was selected for an adapter ({reasons}); check where=.")
    model.requires_grad_(False)
    replace_modules_(model, adapters)
    return Conversion(converted, left, noise)


def _reason_to_leave(
    name: str, module: Any, where: Predicate | None, weight_read_by_parent: bool
) -> str | None:
    if weight_read_by_parent:
        return "nn.MultiheadAttention reads its weight directly"
    # transformers.pytorch_utils.Conv1D, a dense layer that keeps its weight transposed.
    transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    if type(module) is not nn.Linear and not transposed:
        return f"{type(module).__name__} is no dense layer"
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype not in FLOATING:
        return "its weight is not a parameter of floating point"
    if where is not None and not where(name, module):
        return "not selected"
    return None


def _little_noise(module: Any, rank: int, scaling: float) -> PosteriorFactory:
    """A posterior of B whose noise, through A, is 2% of a layer's weights."""
    weight = module.weight
    outputs = weight.shape[0] if isinstance(module, nn.Linear) else weight.shape[1]
    there = 0.0 if weight.is_meta else float(weight.detach().double().square().sum())
    if not there:
        return Additive
    # A has variance 1 / (3 · inputs) for each of its weights when it is new.
    variance = (0.02 / scaling) ** 2 * there * 3 / (rank * outputs)
    return partial(Additive, log_variance=math.log(variance))


def _noise(layer: LoraLinear) -> float:
    """What the adapter adds, next to the weight that is there."""
    _, added = layer.component_moments()
    there = float(layer.base.weight.detach().double().square().sum())
    changed = layer.scaling * math.sqrt(float(added.sum()))
    return changed / math.sqrt(there) if there else math.inf
