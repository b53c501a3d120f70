"""Changing, for the length of a `with` block, how a model draws its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from zeromean.objectives import stochastic_modules
from zeromean.recurrent import RecurrentLayer
from zeromean.samplers import Sampler, mean

# What draws dropout noise while its own `training` flag is set. TransformerEncoderLayer is here
# because in eval mode its fused fast path would skip the dropout inside it.
_DROPS_OUT = (
    _DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    RecurrentLayer,
    nn.TransformerEncoderLayer,
)


# Dropout modules that a `sampling(model, mean)` block has turned off, however deep it is nested.
_silenced: WeakSet[nn.Module] = WeakSet()


@contextmanager
def sampling(model: nn.Module, sampler: Sampler) -> Iterator[nn.Module]:
    """Let everything stochastic in the model draw with `sampler` inside the block.

    `with zm.sampling(model, zm.mean):` propagates means, and turns Dropout off as well. Samplers
    and modes are restored at the end, also after an exception. The model itself is changed for the
    length of the block, so threads that predict at the same time need a copy of the model each.
    """
    if not callable(sampler):
        raise TypeError(f"sampler must be a function such as zm.mean, got {sampler!r}.")
    layers = list(stochastic_modules(model).values())
    replacements = [layer.accepted_sampler(sampler) for layer in layers]
    previous = [layer.sampler for layer in layers]
    modes = [(m, m.training) for m in model.modules() if isinstance(m, _DROPS_OUT)]
    newly_silenced: set[nn.Module] = set()
    try:
        for layer, replacement in zip(layers, replacements, strict=True):
            layer.sampler = replacement
        if sampler is mean:
            newly_silenced.update(module for module, _ in modes if module not in _silenced)
            _silenced.update(newly_silenced)
            for module, _ in modes:
                module.training = False
        yield model
    finally:
        _silenced.difference_update(newly_silenced)
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
            module.training = isinstance(module, _DROPS_OUT) and module not in _silenced
        yield model
    finally:
        for module, mode in modes:
            module.training = mode
