"""Noise on the units that a layer reads, next to the layer and not in anybody's forward.

`zm.add_unit_noise_` puts it there: a module `unit_noise` of the layer that multiplies its input, in
a hook, before the layer sees it. The layer stays what it is, under the name that it has. Layers
that read the same units share their noise, whose KL counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeromean.arguments import require_floating
from zeromean.layers.dropout.hidden_noise import HiddenNoise, take_hidden_noise_
from zeromean.layers.dropout.unit_noise import UnitNoise
from zeromean.layers.plain_attention import restore_torchs_
from zeromean.layers.recurrent import RecurrentLayer

# The module's name in the layer, and so in state dicts.
_NAME = "unit_noise"


class InputNoise(nn.Module):
    """Multiplies what a layer reads by noise on units.

    Args:
        noise: Noise on the units; several layers may share it.
        index: Which unit each input of the layer belongs to. `noise.num_features` stands for
            inputs that have no noise.
        last: Whether the units lie along the last dimension, as for Linear, not along dimension 1.
    """

    index: Tensor

    def __init__(self, noise: UnitNoise, index: Tensor, last: bool):
        super().__init__()
        self.noise = noise
        self.last = last
        self.register_buffer("index", index)

    def forward(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a layer, with noise on the first: a forward pre-hook."""
        input, *others = args
        require_floating(type(layer).__name__, input)
        of_sequences = isinstance(layer, (nn.RNNBase, RecurrentLayer))
        dims = 2 if self.last else 2 + len(layer.kernel_size)  # pyright: ignore
        alone = input.dim() < dims + of_sequences  # One example, without a batch.
        steps_first = of_sequences and not (alone or layer.batch_first)
        batch = input.transpose(0, 1) if steps_first else input
        batch = batch.unsqueeze(0) if alone else batch
        scale = self.per_input(self.noise.scale_for(batch)).to(input.dtype)
        positions = [1] * (batch.dim() - 2)
        examples = scale.shape[:-1]  # Nothing where all have the same multipliers.
        shape = (*examples, *positions, -1) if self.last else (*examples, -1, *positions)
        output = batch * scale.view(shape)
        output = output.transpose(0, 1) if steps_first else output
        return (output.squeeze(0) if alone else output, *others)

    def per_input(self, per_unit: Tensor) -> Tensor:
        """From the multipliers of units, `(*, units)`, to those of inputs: 1 where is no noise."""
        padded = torch.cat([per_unit, per_unit.new_ones(*per_unit.shape[:-1], 1)], -1)
        return padded[..., self.index]

    def fold_(self, layer: Any, per_unit: Tensor) -> None:
        """Multiply the weights of a plain layer for good."""
        names = ["weight"]
        if isinstance(layer, nn.RNNBase):
            names = [f"weight_ih_l0{way}" for way in ("", "_reverse")[: 1 + layer.bidirectional]]
        for name in names:
            weight = getattr(layer, name)
            scale = self.per_input(per_unit).to(weight.dtype)
            shape = [1] * weight.dim()
            shape[0 if getattr(layer, "transposed", False) else 1] = -1
            # A new parameter: another layer may share the old one, and reads it without this noise.
            scaled = (weight * scale.view(shape)).detach()
            setattr(layer, name, nn.Parameter(scaled, requires_grad=weight.requires_grad))


def attach_(layer: nn.Module, input_noise: InputNoise) -> None:
    """Let a layer read its inputs with noise."""
    layer.add_module(_NAME, input_noise)
    layer.register_forward_pre_hook(input_noise)


def input_noise_of(layer: nn.Module) -> InputNoise | None:
    """The noise on what a layer reads, if there is any."""
    found = layer._modules.get(_NAME)
    return found if isinstance(found, InputNoise) else None


def input_noises(model: nn.Module) -> dict[str, InputNoise]:
    """All noise on what layers read, by the names of the layers."""
    found = {name: input_noise_of(module) for name, module in model.named_modules()}
    return {name: noise for name, noise in found.items() if noise is not None}


def take_input_noise_(model: nn.Module) -> dict[str, list[InputNoise | HiddenNoise]]:
    """Take the noise off all layers, also that on hidden units, and return it by their names."""
    taken: dict[str, list[InputNoise | HiddenNoise]] = {}
    for name, noise in take_hidden_noise_(model).items():
        taken.setdefault(name, []).append(noise)
    for name, noise in input_noises(model).items():
        taken.setdefault(name, []).append(noise)
        layer = model.get_submodule(name)
        del layer._modules[_NAME]
        hooks = layer._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is noise]:
            del hooks[key]
    return taken


@torch.no_grad()
def fold_input_noise_(
    model: nn.Module,
    taken: Mapping[str, Sequence[InputNoise | HiddenNoise]],
    weights: Literal["mean", "sample"] = "mean",
) -> None:
    """Multiply the weights of plain layers by what the noise on their inputs is in the mean."""
    scales: dict[UnitNoise, Tensor] = {}
    for name, noise_on in taken.items():
        for found in noise_on:
            noise = found.noise
            if noise not in scales:
                mean = weights == "mean"
                scales[noise] = noise.mean_scale() if mean else noise.sample_scale(1)[0]
            found.fold_(model.get_submodule(name), scales[noise])
    restore_torchs_(model)
