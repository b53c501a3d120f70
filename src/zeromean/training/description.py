"""What makes a run the one that it is: its configuration, model, likelihood and data."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.training.config import TrainingConfig
from zeromean.training.likelihoods import FunctionLikelihood, Likelihood


def describe(
    model: nn.Module,
    config: TrainingConfig,
    *,
    data: str,
    augment: Any,
    likelihood: Likelihood | None = None,
    validation: str | None = None,
    on_batch: Any = None,
) -> dict[str, Any]:
    """What has to be the same for a run to be resumed; what came later only where it is used.

    How many processes there are, and on which devices, is no part of it.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    text = repr(model)
    if config.prune_after_epochs is not None:
        # Masks come in the course of the run, and a model in hand may have them when it is resumed.
        for name, module in model.named_modules():
            if isinstance(module, Posterior):
                shapes.pop(f"{name}.mask" if name else "mask", None)
        text = re.sub(r", pruned|, \d+ left", "", text)
    description = {
        "config": config.described(),
        "model": _without_addresses(f"{text} {shapes}"),
        "augment": _without_addresses(repr(augment)),
        "data": data,
    }
    if likelihood is not None:
        described = likelihood
        if isinstance(likelihood, FunctionLikelihood):
            described = likelihood.function
        description["likelihood"] = _without_addresses(repr(described))
    if on_batch is not None:
        description["on_batch"] = _without_addresses(repr(on_batch))
    if validation is not None and config.monitor is not None:
        description["validation"] = validation
    return description


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
