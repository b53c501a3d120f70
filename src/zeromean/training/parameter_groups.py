"""What an optimizer is given: groups of parameters with rates of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeromean.arguments import require_model, require_numbers
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.dropout.unit_noise import UnitNoise


def require_optimized(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Raise a ValueError where parameters of the model are in none of the optimizers.

    `make_stochastic_`, `zero_mean_` and `to_deterministic` make new parameters, of which an
    optimizer from before knows nothing: it would go on training tensors that no model reads.
    """
    known = {p for each in optimizers for group in each.param_groups for p in group["params"]}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in known]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"No optimizer has {', '.join(missing[:3])}{more}: was it built before the model was "
            "converted? Build it anew from zm.parameter_groups(model, lr=…), or freeze what is not "
            "to be trained by requires_grad_(False)."
        )


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    log_alpha_lr: float | None = None,
    log_alpha_betas: tuple[float, float] | None = None,
    weight_decay: float = 0.0,
    scale_lr: float | None = None,
    scale_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer.

    Weight decay goes to deterministic weights and posterior means with two or more dimensions;
    never to log α and log-variances, whose prior is the KL term (decay would pull α towards 1), nor
    to biases and norm parameters.

    Args:
        lr: Learning rate.
        log_alpha_lr: Learning rate of log α, log-variances and log-scales; 10 · lr lets log α
            cross zero within epochs where lr alone takes tens. Default: lr.
        log_alpha_betas: Adam's betas for the same. Where log α rises, its gradient falls off
            exponentially. Adam divides by a mean over the last 1 / (1 − β₂) steps, in which the
            gradients of long ago prevail, and with β₂ = 0.999 log α in the long run rises by
            about 1 in 2,000 steps, whatever its rate; (0.9, 0.95) lets it go. Default: the
            optimizer's.
        weight_decay: Decay of the first group.
        scale_lr: Learning rate of the scales of variance layers. Default: lr.
        scale_decay: Decay of the scales of variance layers, decoupled from the gradients as in
            AdamW, by Adam too (other optimizers of torch add it to the gradients). In front of a
            normalization only the ratios of scales matter, so it does not change what is best. But
            noise in the gradients makes all scales grow, which dilutes the differences between
            their variances, and makes steps ever smaller relative to them; with decay, old noise is
            forgotten.
    """
    require_model(model)
    rates = {"lr": lr, "log_alpha_lr": log_alpha_lr, "weight_decay": weight_decay}
    rates |= {"scale_lr": scale_lr, "scale_decay": scale_decay}
    require_numbers(**{name: rate for name, rate in rates.items() if rate is not None})
    logarithms, scales = set(), set()
    for module in model.modules():
        if isinstance(module, (Posterior, UnitNoise)):
            for name, parameter in module.named_parameters(recurse=False):
                if name.startswith("log_"):
                    logarithms.add(parameter)
                elif name == "scale":
                    scales.add(parameter)
    groups: dict[str, dict[str, Any]] = {
        "weights": {"params": [], "lr": lr, "weight_decay": weight_decay},
        "undecayed": {"params": [], "lr": lr, "weight_decay": 0.0},
        "scales": {
            "params": [],
            "lr": lr if scale_lr is None else scale_lr,
            "weight_decay": scale_decay,
            "decoupled_weight_decay": True,
        },
        "log_alpha": {
            "params": [],
            "lr": lr if log_alpha_lr is None else log_alpha_lr,
            "weight_decay": 0.0,
        },
    }
    if log_alpha_betas is not None:
        groups["log_alpha"]["betas"] = log_alpha_betas
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter in logarithms:
            name = "log_alpha"
        elif parameter in scales and (scale_decay or scale_lr is not None):
            name = "scales"
        else:
            name = "undecayed" if parameter in scales or parameter.dim() < 2 else "weights"
        groups[name]["params"].append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]
