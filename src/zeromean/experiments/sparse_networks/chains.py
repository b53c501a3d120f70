"""Chains of sparse layers without the units that pruning has emptied, and back.

Training goes on with the small network, at a fraction of the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean.compression.compress import trimmed_with_plan, units_left

Architecture = Callable[..., nn.Module]


class Chain(NamedTuple):
    """An architecture whose stochastic layers follow each other, and what is left of them.

    Attributes:
        architecture: Makes the network, from a factory for each layer.
        layers: Names of the layers, in order; all outputs of the last one are kept.
        kept: Units that are left of each layer, by their numbers in the whole network.
    """

    architecture: Architecture
    layers: tuple[str, ...]
    kept: tuple[Tensor, ...]


def whole_chain(architecture: Architecture, layers: Sequence[str], model: nn.Module) -> Chain:
    """All units of a network."""
    kept = [torch.arange(_layer(model, name).weight.shape[0]) for name in layers]
    return Chain(architecture, tuple(layers), tuple(kept))


@torch.no_grad()
def shrink(chain: Chain, model: nn.Module) -> tuple[Chain, nn.Module]:
    """A copy of a pruned network with the same mean propagation, without its empty units.

    What can go, and what it leaves in the biases, `zm.compress` finds. The mean of what a constant
    unit adds is kept; its noise, which weights on a constant have, is not.
    """
    units = units_left(model)
    trimmed, plan = trimmed_with_plan(model)
    alive = [units[name] for name in chain.layers]
    widths = [_layer(model, name).weight.shape[1] for name in chain.layers]
    inputs = [torch.ones(widths[0], dtype=torch.bool)]
    for width, rows in zip(widths[1:], alive[:-1], strict=True):
        inputs.append(rows.repeat_interleave(width // len(rows)))  # Of a unit, all positions.
    make = {
        name: partial(_like, _layer(model, name), (int(columns.sum()), int(rows.sum())))
        for name, rows, columns in zip(chain.layers, alive, inputs, strict=True)
    }
    small = chain.architecture(**make)
    for name, rows, columns in zip(chain.layers, alive, inputs, strict=True):
        old, new = _layer(model, name), _layer(small, name)
        for parameter in ("mean", "log_variance"):
            values = getattr(old.weight, parameter)[rows][:, columns]
            getattr(new.weight, parameter).copy_(values)
        new.weight.mask = _mask(old)[rows][:, columns]
        new.bias.copy_(trimmed.get_submodule(plan.layers[name].place or "").bias)
    kept = tuple(old[rows] for old, rows in zip(chain.kept, alive, strict=True))
    return chain._replace(kept=kept), small


@torch.no_grad()
def expand(chain: Chain, model: nn.Module, whole: nn.Module) -> nn.Module:
    """Put a small network into a whole one (changed in place): what is not in it is pruned."""
    previous: Tensor | None = None
    for name, kept in zip(chain.layers, chain.kept, strict=True):
        small, large = _layer(model, name), _layer(whole, name)
        positions = _positions(large.weight.shape, previous, small.weight.shape)
        mask = torch.zeros(large.weight.shape, dtype=torch.bool)
        for parameter in ("mean", "log_variance"):
            values = getattr(large.weight, parameter)
            chosen = values[kept]
            chosen[:, positions] = getattr(small.weight, parameter)
            values[kept] = chosen
        chosen = mask[kept]
        chosen[:, positions] = _mask(small)
        mask[kept] = chosen
        large.weight.mask = mask
        large.bias.zero_()
        large.bias[kept] = small.bias
        previous = kept
    return whole


def _like(layer: Any, sizes: tuple[int, int], *_: Any) -> nn.Module:
    """A layer like another one with other sizes, whatever the architecture asks for."""
    options: dict[str, Any] = {"posterior": zm.Additive, "prior": layer.prior}
    if isinstance(layer, zm.Conv2d):
        return zm.Conv2d(*sizes, layer.kernel_size, **options)
    return zm.Linear(*sizes, **options)


def _layer(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


def _mask(layer: Any) -> Tensor:
    mask = layer.weight.mask
    return torch.ones(layer.weight.shape, dtype=torch.bool) if mask is None else mask.clone()


def _positions(shape: torch.Size, previous: Tensor | None, small: torch.Size) -> Tensor:
    """Which inputs of a whole layer those of a small one are."""
    if previous is None:
        return torch.arange(shape[1])
    each = small[1] // len(previous)
    return (previous.unsqueeze(1) * each + torch.arange(each)).flatten()
