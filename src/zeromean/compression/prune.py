"""Pruning by what the posterior says.

A pruned weight is exactly zero and has no noise: `prune_` sets the `mask` of its posterior, which
stands in the state dict and holds through further training. `zm.sparsity` counts what is left,
and `zm.compress` makes the network really smaller and faster.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    require_choice,
    require_model,
    require_numbers,
    require_predicate,
)
from zeromean.compression.candidates import PrunableUnits, PrunableWeights
from zeromean.compression.sparsity import weight_name
from zeromean.conversion.make_stochastic import Predicate
from zeromean.distributions.posteriors.drop_connect import DropConnect
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.multiplicative import Multiplicative
from zeromean.distributions.posteriors.positive import Exponential
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.dropout.unit_noise import UnitNoise


class EmptiedWarning(UserWarning):
    """Pruning has left nothing of a layer."""


@dataclass(frozen=True)
class Pruning:
    """What `prune_` did.

    Attributes:
        pruned: How many weights (of noise modules: units) of each layer are gone now that were
            there before.
        emptied: Names of the layers that have nothing left.
        left: Names of the layers with a posterior that were not pruned, and why.
    """

    pruned: dict[str, int]
    emptied: list[str]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"pruned {count} of {name}" + (": nothing is left" if name in self.emptied else "")
            for name, count in self.pruned.items()
        ]
        return "\n".join([*lines, *(f"left {name}: {why}" for name, why in self.left.items())])


def prune_(
    model: nn.Module,
    *,
    by: Literal["snr", "variance"] = "snr",
    threshold: float | None = None,
    sparsity: float | None = None,
    scope: Literal["layer", "global"] = "layer",
    unit: Literal["weight", "neuron"] = "weight",
    where: Predicate | None = None,
) -> Pruning:
    """Prune the weights that carry little, in place. What is pruned already stays so.

    Which criterion fits a layer follows from its posterior: by="snr" where every weight has an α
    of its own (Additive; Multiplicative with share="weight"), by="variance" where the means say
    nothing about single weights (ZeroMean; Multiplicative with a shared α). The others are left
    alone, and refused when `where` selects them: a variance layer has no signal at all in this
    sense, and can be crucial all the same (Neklyudov et al., 2019).

    A layer may lose all its weights (networks trained on random labels do); a warning names it.
    BatchNorm behind pruned layers: see `recalibrate_batchnorm_`.

    Args:
        by: "snr" prunes where α = variance / mean² is large, "variance" where the variance is
            small. The units of noise modules (`zm.LogNormalDropout`) go by their signal-to-noise
            ratio, 1/√α.
        threshold: Prune beyond it: where log α > threshold, or variance < threshold. Default for
            "snr": log α > 3, and units with a signal-to-noise ratio below 1.
        sparsity: Prune so large a part of every layer instead.
        scope: Take `sparsity` of each "layer", or of all selected layers together ("global").
        unit: Prune single weights, or a whole "neuron" (output unit, filter or embedding column)
            at once, by the α of its weights together, Σ variance / Σ mean², or their average
            variance. A neuron all of whose weights have log α > 3 has it too.
        where: Predicate of name and layer that selects what is pruned.
    """
    require_model(model)
    require_predicate(where)
    _check(by, threshold, sparsity, scope, unit)
    candidates, left = _select(model, by, scope, unit, sparsity, where)
    if sparsity is None:
        sign = -1 if by == "variance" else 1
        doomed = [
            c.excess > (c.default_threshold if threshold is None else sign * threshold)
            for c in candidates
        ]
    else:
        doomed = _largest(candidates, sparsity, together=scope == "global")
    pruned = {
        candidate.name: candidate.prune_(units)
        for candidate, units in zip(candidates, doomed, strict=True)
    }
    emptied = [candidate.name for candidate in candidates if candidate.is_empty()]
    if emptied:
        warnings.warn(
            f"Nothing is left of {', '.join(emptied)}: what comes after sees a constant; if that "
            "is not what the data say, prune less or train longer.",
            EmptiedWarning,
            stacklevel=2,
        )
    return Pruning(pruned, emptied, left)


def require_prunable(model: nn.Module) -> None:
    """Refuse a model that `prune_(model)` would refuse."""
    _select(model, "snr", "layer", "weight", None, None)


def _check(by: str, threshold: float | None, sparsity: float | None, scope: str, unit: str) -> None:
    require_choice("by", by, ("snr", "variance"))
    require_choice("scope", scope, ("layer", "global"))
    require_choice("unit", unit, ("weight", "neuron"))
    given = {"threshold": threshold, "sparsity": sparsity}
    require_numbers(**{name: value for name, value in given.items() if value is not None})
    if threshold is not None and sparsity is not None:
        raise ValueError(
            f"prune_ takes a threshold or a sparsity, got threshold={threshold} and "
            f"sparsity={sparsity}; drop one of them."
        )
    if sparsity is not None and not 0 <= sparsity < 1:
        raise ValueError(
            f"sparsity must be the part of the weights to prune, from 0 to below 1, got {sparsity}."
        )
    if by == "snr" and threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"threshold must be a finite log α, got {threshold}; 3 is usual.")
    if by == "variance":
        if threshold is None and sparsity is None:
            raise ValueError("by='variance' has no usual threshold; pass threshold= or sparsity=.")
        if threshold is not None and not 0 < threshold < math.inf:
            raise ValueError(f"threshold must be a positive variance, got {threshold}.")


def _select(
    model: nn.Module,
    by: str,
    scope: str,
    unit: str,
    sparsity: float | None,
    where: Predicate | None,
) -> tuple[list[PrunableWeights | PrunableUnits], dict[str, str]]:
    """What to prune, and the reason why each other layer is left."""
    candidates: list[PrunableWeights | PrunableUnits] = []
    left: dict[str, str] = {}
    seen: set[nn.Module] = set()
    for layer, owner, name, part in _stochastic_parts(model):
        if part in seen:
            continue  # It is shared with a layer that came before.
        if where is not None and not where(layer, owner):
            left[name] = "not selected"
            continue
        seen.add(part)
        if isinstance(part, UnitNoise):
            reason = reason_against_units(part, by)
            mixed = sparsity is not None and scope == "global" and unit == "weight"
            if reason is None and mixed:
                left[name] = "units and weights have no common order; prune them by threshold"
                continue
        else:
            reason = reason_against(part, by)
        if reason is None:
            if isinstance(part, UnitNoise):
                candidates.append(PrunableUnits(name, part))
            else:
                candidates.append(PrunableWeights(name, part, by, unit))
        elif where is not None:
            raise ValueError(f"{name} cannot be pruned by {by}: {reason}.")
        else:
            left[name] = reason
    if not candidates:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items())
        raise ValueError(
            f"Nothing to prune by {by} ({reasons})."
            if reasons
            else "The model has no posterior to prune by; convert it with zm.make_stochastic_("
            "model, posterior=zm.Additive) and train it, or use torch.nn.utils.prune."
        )
    return candidates, left


def reason_against(posterior: Posterior, by: str) -> str | None:
    """Why a weight is not pruned by a criterion; None where it is."""
    if not isinstance(posterior, FactorizedPosterior):
        return "its weights depend on each other, so that none can be judged by itself"
    shared = isinstance(posterior, Multiplicative) and posterior.share != "weight"
    shared = shared or isinstance(posterior, (DropConnect, Exponential))
    own_alpha = posterior.has_mean and not shared
    if by == "variance":
        return "its means carry the signal; use by='snr'" if own_alpha else None
    if own_alpha:
        return None
    kind = "all its means are zero" if not posterior.has_mean else "its weights share their α"
    return (
        f"{kind}, so that the signal-to-noise ratio cannot tell them apart, and a layer without "
        "signal can still be crucial; use by='variance'"
    )


def reason_against_units(noise: UnitNoise, by: str) -> str | None:
    """The same for noise on units."""
    if by == "variance":
        return "units go by their signal-to-noise ratio; use by='snr'"
    return None if noise.prunable else f"{type(noise).__name__} is not noise to prune by"


def _largest(
    candidates: list[PrunableWeights | PrunableUnits], sparsity: float, *, together: bool
) -> list[Tensor]:
    """The part of all units (of each candidate, or of all together) that exceeds the rest."""
    groups = [candidates] if together else [[candidate] for candidate in candidates]
    doomed: list[Tensor] = []
    for group in groups:
        excess = torch.cat([candidate.excess.flatten().cpu().double() for candidate in group])
        chosen = torch.zeros_like(excess, dtype=torch.bool)
        chosen[excess.topk(round(sparsity * len(excess))).indices] = True
        parts = chosen.split([candidate.excess.numel() for candidate in group])
        for candidate, part in zip(group, parts, strict=True):
            doomed.append(part.view(candidate.excess.shape).to(candidate.excess.device))
    return doomed


def _stochastic_parts(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, str, Posterior | UnitNoise]]:
    """Every posterior and noise module: its layer by name, the layer, its own name, itself."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, UnitNoise):
            yield name, module, name, module
        for child_name, child in module.named_children():
            if isinstance(child, Posterior) and not child.layout.affine:
                yield name, module, weight_name(name, child_name), child
