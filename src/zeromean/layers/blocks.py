"""Changing, for the length of a `with` block, how a model draws its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakSet

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from zeromean.arguments import nearest, require_function, require_integer, require_model
from zeromean.layers.attention import MultiheadAttention
from zeromean.layers.recurrent import RecurrentLayer
from zeromean.layers.stochastic_module import stochastic_modules, swapped_samplers
from zeromean.registry import SAMPLERS
from zeromean.samplers.fixed_noise import HeldNoise, Noise, draw
from zeromean.samplers.kinds import Draws, drawn_by
from zeromean.samplers.sampler import Sampler

# What draws dropout noise while its own `training` flag is set. TransformerEncoderLayer is here
# because in eval mode its fused fast path would skip the dropout inside it.
_DROPS_OUT = (
    _DropoutNd,
    nn.MultiheadAttention,
    MultiheadAttention,
    nn.RNNBase,
    RecurrentLayer,
    nn.TransformerEncoderLayer,
)


# Dropout modules that a `sampling(model, mean)` block has turned off, however deep it is nested.
_silenced: WeakSet[nn.Module] = WeakSet()


@contextmanager
def sampling(model: nn.Module, sampler: Sampler) -> Iterator[nn.Module]:
    """Let everything stochastic in the model draw with `sampler` inside the block.

    `with zm.sampling(model, zm.mean):` propagates means, and turns Dropout off as well. Samplers,
    and the modes that `zm.mean` changes, are restored at the end, also after an exception. The
    model itself is changed for the length of the block, so threads that predict at the same time
    need a copy of the model each. A copy that is made inside of the block draws as the model does
    outside; its Dropout, with `zm.mean`, stays off until `copy.train()`.
    """
    require_model(model)
    require_function("sampler", sampler, nearest(sampler, SAMPLERS.shipped))
    layers = stochastic_modules(model).values()
    accepted = {layer: layer.accepted_sampler(sampler) for layer in layers}
    silent = drawn_by(sampler) is Draws.NOTHING
    with swapped_samplers(accepted), _without_dropout(model) if silent else nullcontext():
        yield model


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    dropping = [module for module in model.modules() if isinstance(module, _DROPS_OUT)]
    newly_silenced = {module for module in dropping if module not in _silenced}
    with restored_modes(model):
        try:
            _silenced.update(newly_silenced)
            for module in dropping:
                module.training = False
            yield
        finally:
            _silenced.difference_update(newly_silenced)


@contextmanager
def held_noise(
    model: nn.Module, noise: Noise | None = None, *, num_objects: int | None = None
) -> Iterator[HeldNoise]:
    """Hold the noise: inside the block the model is one network drawn from its posterior.

    Every call uses the same noise, with the parameters as they are at the time, so that gradients
    reach them. `with zm.held_noise(model) as held:` draws the noise, `held.redraw()` draws it anew.
    Weights are drawn as with `zm.weight`, whatever the layers' samplers; torch's own Dropout is
    left alone. Under `torch.func.vmap` with `randomness="different"`, a block inside the mapped
    function holds noise of its own for every sample.

    Args:
        noise: Noise to hold, from `zm.draw_noise`; default: it is drawn.
        num_objects: Give each of so many examples a network of its own: example i of every batch
            meets the same network i, and `held.redraw(objects)` changes the networks of some. The
            examples must be dimension 0 of what every layer sees, not only of the model's inputs.
    """
    require_model(model)
    if num_objects is not None:
        num_objects = require_integer("num_objects", num_objects, at_least=1)
    held = HeldNoise(_distributions(model), num_objects)
    if noise is None:
        held.redraw()
    else:
        held.hold(noise)
    with sampling(model, held):
        yield held


def draw_noise(model: nn.Module, num_samples: int | None = None) -> Noise:
    """Draw the noise of everything random in a model, for `zm.held_noise(model, noise)`.

    Args:
        num_samples: Draw it so many times, along a new first dimension of every tensor.
    """
    require_model(model)
    if num_samples is not None:
        num_samples = require_integer("num_samples", num_samples, at_least=1)
    return {name: draw(part, num_samples) for name, part in _distributions(model).items()}


@contextmanager
def monte_carlo_modes(model: nn.Module) -> Iterator[nn.Module]:
    """BatchNorm with running statistics, Dropout on: the modes of Monte-Carlo prediction."""
    with restored_modes(model):
        for module in model.modules():
            module.training = isinstance(module, _DROPS_OUT) and module not in _silenced
        yield model


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Put every module back into its train or eval mode after the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _distributions(model: nn.Module) -> dict[str, nn.Module]:
    """Everything random in a model by name; what is tied stands under its first name."""
    found: dict[nn.Module, str] = {}
    for layer_name, layer in stochastic_modules(model).items():
        for name, distribution in layer.distributions().items():
            found.setdefault(distribution, f"{layer_name}.{name}" if layer_name else name)
    return {name: distribution for distribution, name in found.items()}
