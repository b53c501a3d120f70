"""The training objective: the evidence lower bound, KL schedules and parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeromean.arguments import require_integer, require_model, require_numbers, shown
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.layers.dropout.unit_noise import UnitNoise
from zeromean.layers.stochastic_module import no_kl, stochastic_modules


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
    """The negative ELBO for each example: nll_mean + beta · kl / num_data.

    Args:
        nll_mean: Negative log-likelihood, averaged over the mini-batch (`F.cross_entropy`'s
            default reduction).
        kl: `zm.kl_divergence(model)`.
        num_data: Examples in the whole training set: not in the batch, not batches in an epoch.
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
            f"num_data must be the number of examples in the training set, got {num_data}."
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
            if isinstance(module, (FactorizedPosterior, UnitNoise)):
                module.clip_log_alpha_(low, high)
