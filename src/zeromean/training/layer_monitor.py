"""What to watch in the layers of a model: log α, KL, convergence, and values that overflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeromean.conversion.certificate import VARIANCE_LAYER_LOG_ALPHA, effective_log_alpha
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.stochastic_module import StochasticModule, stochastic_modules
from zeromean.training.objective import kl_by_layer


def layer_metrics(model: nn.Module) -> dict[str, float]:
    """`log_alpha/NAME` (effective, where there are means) and `kl/NAME` of every layer.

    LSTM and GRU have several weights, each with a log α: `log_alpha/NAME.weight_ih_l0`.
    """
    log_alphas = {
        f"log_alpha/{name if part == 'weight' else f'{name}.{part}'}": effective_log_alpha(
            posterior
        )
        for name, module in stochastic_modules(model).items()
        for part, posterior in module.distributions().items()
        if isinstance(posterior, Posterior) and posterior.has_mean
    }
    with torch.no_grad():
        kls = {f"kl/{name}": float(kl) for name, kl in kl_by_layer(model).items()}
    return {**log_alphas, **kls}


def new_variance_layers(
    metrics: dict[str, float], history: Iterable[dict[str, Any]]
) -> dict[str, float]:
    """Layers that are variance layers now and never were, with their effective log α."""
    known = {name for row in history for name in row["new_variance_layers"]}
    log_alphas = {
        name.removeprefix("log_alpha/"): value
        for name, value in metrics.items()
        if name.startswith("log_alpha/")
    }
    return {n: v for n, v in log_alphas.items() if v > VARIANCE_LAYER_LOG_ALPHA and n not in known}


def not_finite_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Names of the parameters that hold NaN or infinite values, by the name of their layer."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Posterior):
            continue  # Its parameters belong to the layer around it.
        recurse = isinstance(module, StochasticModule)
        bad = [n for n, p in module.named_parameters(recurse=recurse) if not p.isfinite().all()]
        if bad:
            found[name] = bad
    return found


def why_not_finite(model: nn.Module, inputs: Any, loss: Callable[[], Any]) -> str:
    """Where a loss that is not finite comes from, in words that name the layer.

    Args:
        loss: Computes the loss once more, with the same noise.
    """
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
    if not all(tensor.isfinite().all() for tensor in tensors):
        return "the inputs of the batch are not finite; clean the data"
    parameters = not_finite_parameters(model)
    if parameters:
        return f"{describe_parameters(parameters)}; {_ADVICE}"
    activations: list[str] = []

    def look(name: str, outputs: Any) -> None:
        outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
        tensors = [t for t in outputs if isinstance(t, Tensor) and t.is_floating_point()]
        if not all(t.isfinite().all() for t in tensors):
            activations.append(name)

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            # Inner modules return first, so the first of them is where it began.
            hook = module.register_forward_hook(lambda _m, _i, outputs, n=name: look(n, outputs))
            stack.callback(hook.remove)
        loss()
    if activations:
        return f"the activations of {_layer(activations[0])} are not finite; {_ADVICE}"
    with torch.no_grad():
        kls = {name: float(kl) for name, kl in kl_by_layer(model).items()}
    for name, kl in kls.items():
        if not math.isfinite(kl):
            return f"the KL term of {_layer(name)} is {kl}; {_ADVICE}"
    return "all parameters and activations are finite, so it is the likelihood of the targets"


def describe_parameters(parameters: dict[str, list[str]]) -> str:
    """Say "the parameters of layer dense1 (weight.scale) are not finite"."""
    layers = ", ".join(f"{_layer(n)} ({', '.join(p)})" for n, p in parameters.items())
    return f"the parameters of {layers} are not finite"


_ADVICE = "a smaller lr or log_alpha_lr may help, or bounds with clip_log_alpha"


def _layer(name: str) -> str:
    return f"layer {name}" if name else "the model itself"
