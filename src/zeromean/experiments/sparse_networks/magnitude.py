"""Magnitude pruning with training in between: what sparse variational dropout stands next to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune as torch_prune


def prune_by_magnitude(
    network: nn.Module,
    factors: Sequence[float],
    retrain: Callable[[nn.Module, list[float]], nn.Module],
) -> Iterator[tuple[float, nn.Module]]:
    """Prune the smallest weights of all layers together, train, and prune more.

    Yields the compression and the network of every step; the network that is given stays as it is.

    Args:
        factors: All weights over those that are left, rising.
        retrain: Trains the pruned network, given the factors up to this one.
    """
    model, steps = copy.deepcopy(network), []
    weights = [(m, "weight") for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    total = sum(module.weight.numel() for module, _ in weights)
    for factor in factors:
        # torch's pruning does not know other formats.
        model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
        steps.append(factor)
        superfluous = _count(weights) - round(total / factor)
        torch_prune.global_unstructured(weights, torch_prune.L1Unstructured, amount=superfluous)
        model = retrain(model, list(steps))
        weights = [(m, "weight") for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        yield total / _count(weights), model


def _count(weights: Sequence[tuple[Any, str]]) -> int:
    return sum(int(module.weight.count_nonzero()) for module, _ in weights)
