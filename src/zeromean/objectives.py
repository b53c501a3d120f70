"""The training objective: the evidence lower bound, KL schedules and parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.arguments import require_integer, require_model, require_numbers, shown
from zeromean.dropout import UnitNoise
from zeromean.posteriors import Posterior
from zeromean.stochastic import no_kl, stochastic_modules


def kl_by_layer(model: nn.Module) -> dict[str, Tensor]:
    """The KL term of everything that has one, by name; a tied posterior counts once."""
    require_model(model)
    terms: dict[str, Tensor] = {}
    counted: set[nn.Module] = set()
    for name, module in stochastic_modules(model).items():
        uncounted = {d: kl for d, kl in module.kl_terms().items() if d not in counted}
        if uncounted:
            counted.update(uncounted)
            terms[name] = torch.stack([kl() for kl in uncounted.values()]).sum()
    return terms


def kl_divergence(model: nn.Module) -> Tensor:
    """KL(q ‖ p) of the whole model: a pure function of its parameters.

    A zero tensor where nothing has a KL term.
    """
    terms = list(kl_by_layer(model).values())
    if not terms:
        return no_kl(model)
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def elbo_loss(nll_mean: Tensor, kl: Tensor, *, num_data: int, beta: float = 1.0) -> Tensor:
    """The negative ELBO for each object: nll_mean + beta · kl / num_data.

    Args:
        nll_mean: Negative log-likelihood, averaged over the mini-batch (`F.cross_entropy`'s
            default reduction).
        kl: `zm.kl_divergence(model)`.
        num_data: Objects in the whole training set: not in the batch, not batches in an epoch.
        beta: Weight of the KL term: a warm-up schedule's value, or the ⅓ of Kingma's set-up.
    """
    for name, value in (("nll_mean", nll_mean), ("kl", kl)):
        if not isinstance(value, (Tensor, int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a tensor with one number, got {shown(value)}.")
    if isinstance(nll_mean, Tensor) and nll_mean.dim() > 0:
        raise ValueError(
            "nll_mean must be one number, averaged over the mini-batch, got a tensor of shape "
            f"{tuple(nll_mean.shape)}; use nll.mean()."
        )
    if isinstance(kl, Tensor) and kl.dim() > 0:
        raise ValueError(
            f"kl must be one number, summed over the model, got a tensor of shape "
            f"{tuple(kl.shape)}; use zm.kl_divergence(model)."
        )
    require_numbers(num_data=num_data)
    if not isinstance(beta, Tensor):
        require_numbers(beta=beta)
    if not 0 < num_data < math.inf:
        raise ValueError(
            f"num_data must be the number of objects in the training set, got {num_data}."
        )
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta must be a finite number of at least 0, got {beta}.")
    return nll_mean + kl * (beta / num_data)


def linear_warmup(steps: int, *, start: float = 0.0, end: float = 1.0) -> Callable[[int], float]:
    """beta that rises linearly from `start` at step 0 to `end` at step `steps` and stays there."""
    require_integer("steps", steps, at_least=1)
    require_numbers(start=start, end=end)
    return lambda step: start + (end - start) * min(max(step, 0) / steps, 1.0)


def cosine_warmup(steps: int, *, start: float = 0.0, end: float = 1.0) -> Callable[[int], float]:
    """beta that rises from `start` to `end` along half a cosine and stays there."""
    linear = linear_warmup(steps)
    require_numbers(start=start, end=end)
    return lambda step: start + (end - start) * 0.5 * (1 - math.cos(math.pi * linear(step)))


def clip_log_alpha_(model: nn.Module, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Project every learned log α of weights and units into [low, high], after optimizer steps.

    Frozen parameters stay as they are. `high=0` is Kingma's α ≤ 1. A projection, not a clamp in
    the forward pass: a clamped parameter would get no gradient and could never come back.
    """
    require_model(model)
    require_numbers(low=low, high=high)
    if not low <= high:
        raise ValueError(f"low must not exceed high, got low={low}, high={high}.")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (Posterior, UnitNoise)):
                module.clip_log_alpha_(low, high)


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
            their variances, and makes steps ever smaller beside them; with decay, old noise is
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
