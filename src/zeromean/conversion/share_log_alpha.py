"""One α for several layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zeromean.arguments import require_model, require_predicate
from zeromean.conversion.become_prior import random_layers
from zeromean.distributions.posteriors.multiplicative import Multiplicative


def share_log_alpha_(
    model: nn.Module, *, where: Callable[[str, nn.Module], bool] | None = None
) -> nn.Parameter:
    """Give all layers of `zm.Multiplicative` with share="layer" one log α, and return it.

    It starts at the average of theirs. The KL still counts every weight. The tie goes through
    `zm.save`, `zm.load` and copies; build the optimizer afterwards. Molchanov & Ashuha (2016).

    Args:
        where: Predicate of name and layer that selects. Default: all that have an α by layer.
    """
    require_model(model)
    require_predicate(where)
    chosen: dict[Multiplicative, str] = {}
    for name, layer in random_layers(model).items():
        if where is not None and not where(name, layer):
            continue
        for part in layer.distributions().values():
            if isinstance(part, Multiplicative) and part.share == "layer":
                chosen.setdefault(part, name)
            elif where is not None:
                raise ValueError(
                    f"{name} has no α of the layer to share: its posterior is {part}; use "
                    'partial(zm.Multiplicative, share="layer").'
                )
    if len(chosen) < 2:
        raise ValueError(
            f"Sharing one α takes at least two layers with an α by layer, got {len(chosen)}; use "
            'partial(zm.Multiplicative, share="layer") as their posterior.'
        )
    kinds = {(posterior.log_alpha.dtype, posterior.log_alpha.device) for posterior in chosen}
    if len(kinds) > 1:
        raise ValueError(
            f"The layers {', '.join(chosen.values())} have α of several types or devices; bring "
            "the model to one by model.to(…)."
        )
    shared = next(iter(chosen)).log_alpha
    with torch.no_grad():
        shared.copy_(torch.stack([posterior.log_alpha for posterior in chosen]).mean())
    for posterior in chosen:
        posterior.log_alpha = shared
    return shared
