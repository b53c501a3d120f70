"""Chains of sparse layers without the units that pruning has emptied, and back.

Training goes on with the small network, at a fraction of the cost. A unit without weights into it
is a constant, which goes into the biases behind it; one that nobody reads is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zeromean as zm

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

    Between two layers there may be what maps constants to constants: pooling, ReLU, flattening.
    The mean of what a constant adds is kept; its noise, which weights on a constant have, is not.
    """
    layers = [_layer(model, name) for name in chain.layers]
    masks = [_mask(layer) for layer in layers]
    biases = [layer.bias.clone() for layer in layers]
    alive = [torch.ones(len(mask), dtype=torch.bool) for mask in masks]
    for _ in layers:  # What one pass removes can empty its neighbours.
        for i in range(len(layers) - 1):
            fed = masks[i].flatten(1).any(1)
            read = _by_unit(masks[i + 1], len(alive[i])).flatten(2).any(2).any(0)
            # A constant unit that is read: what it adds moves into the bias behind it.
            constant = alive[i] & ~fed & read
            if constant.any():
                value = _between(model, chain.layers[i], biases[i])
                mean = layers[i + 1].weight.mean_and_scale()[0]
                added = _by_unit(mean * masks[i + 1], len(alive[i])).flatten(2).sum(2)
                biases[i + 1] += added[:, constant] @ value[constant]
            alive[i] &= fed & read
            _by_unit(masks[i + 1], len(alive[i]))[:, ~alive[i]] = False
            masks[i][~alive[i]] = False
    for units in alive:
        units[0] |= not units.any()  # A layer has at least one unit, here without weights.
    return _rebuilt(chain, layers, masks, biases, alive)


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


def _rebuilt(
    chain: Chain,
    layers: list[Any],
    masks: list[Tensor],
    biases: list[Tensor],
    alive: list[Tensor],
) -> tuple[Chain, nn.Module]:
    make: dict[str, Any] = {}
    columns: list[Tensor] = []
    for i, (name, layer, mask) in enumerate(zip(chain.layers, layers, masks, strict=True)):
        inputs = torch.ones(mask.shape[1], dtype=torch.bool)
        if i:
            inputs = alive[i - 1].repeat_interleave(mask.shape[1] // len(alive[i - 1]))
        columns.append(inputs)
        sizes = int(inputs.sum()), int(alive[i].sum())
        make[name] = partial(_like, layer, sizes)
    small = chain.architecture(**make)
    for name, layer, mask, bias, rows, inputs in zip(
        chain.layers, layers, masks, biases, alive, columns, strict=True
    ):
        new = _layer(small, name)
        for parameter in ("mean", "log_variance"):
            values = getattr(layer.weight, parameter)[rows][:, inputs]
            getattr(new.weight, parameter).copy_(values)
        new.weight.mask = mask[rows][:, inputs]
        new.bias.copy_(bias[rows])
    kept = tuple(old[rows] for old, rows in zip(chain.kept, alive, strict=True))
    return chain._replace(kept=kept), small


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


def _by_unit(weights: Tensor, num_units: int) -> Tensor:
    """A weight with its inputs by the unit before them, `(outputs, units, *)`: a view."""
    return weights.view(weights.shape[0], num_units, -1, *weights.shape[2:])


def _positions(shape: torch.Size, previous: Tensor | None, small: torch.Size) -> Tensor:
    """Which inputs of a whole layer those of a small one are."""
    if previous is None:
        return torch.arange(shape[1])
    each = small[1] // len(previous)
    return (previous.unsqueeze(1) * each + torch.arange(each)).flatten()


def _between(model: nn.Module, name: str, bias: Tensor) -> Tensor:
    """What units that are constant at their bias are when the next layer reads them."""
    names = [n for n, _ in model.named_children()]
    value = bias
    for following in names[names.index(name) + 1 :]:
        module = model.get_submodule(following)
        if isinstance(module, zm.StochasticLayer):
            break
        if isinstance(module, nn.ReLU):
            value = value.relu()
        elif not isinstance(module, nn.MaxPool2d | nn.Flatten | nn.Identity):
            raise TypeError(f"{following} ({type(module).__name__}) may not keep constants.")
    return value
