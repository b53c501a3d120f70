"""Changing, for the length of a `with` block, how a model draws its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from zeromean.layers import checked_sampler
from zeromean.objectives import stochastic_layers
from zeromean.samplers import Sampler, mean

# What draws dropout noise while its own `training` flag is set. TransformerEncoderLayer is here
# because in eval mode its fused fast path would skip the dropout inside it.
_DROPS_OUT = (_DropoutNd, nn.MultiheadAttention, nn.RNNBase, nn.TransformerEncoderLayer)


@contextmanager
def sampling(model: nn.Module, sampler: Sampler) -> Iterator[nn.Module]:
    """Let every stochastic layer of the model draw with `sampler` inside the block.

    `with zm.sampling(model, zm.mean):` propagates means, and turns Dropout off as well. Samplers
    and modes are restored at the end, also after an exception.
    """
    layers = list(stochastic_layers(model).values())
    replacements = [checked_sampler(sampler, layer.weight) for layer in layers]
    previous = [layer.sampler for layer in layers]
    modes = [(m, m.training) for m in model.modules() if isinstance(m, _DROPS_OUT)]
    try:
        for layer, replacement in zip(layers, replacements, strict=True):
            layer.sampler = replacement
        if sampler is mean:
            for module, _ in modes:
                module.training = False
        yield model
    finally:
        for layer, original in zip(layers, previous, strict=True):
            layer.sampler = original
        for module, mode in modes:
            module.training = mode


@contextmanager
def monte_carlo_modes(model: nn.Module) -> Iterator[nn.Module]:
    """BatchNorm with running statistics, Dropout on: the modes of Monte-Carlo prediction."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = isinstance(module, _DROPS_OUT)
        yield model
    finally:
        for module, mode in modes:
            module.training = mode
