"""Noise on the hidden units of LSTM and GRU, where the layer reads them itself.

A hidden unit is read by what comes behind the layer, by the layer above and, at the next step, by
all units of its own: all gates of each. Behind the layer there is `InputNoise`; inside, one draw
for a call multiplies the columns of the weights that read the unit, so that torch's kernels run as
ever (Lobacheva, Chirkova & Vetrov, 2018). `zm.add_unit_noise_` puts it there, under `hidden_noise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from zeromean.layers.dropout.unit_noise import UnitNoise
from zeromean.layers.recurrent import RecurrentLayer

# The module's name in the layer, and so in state dicts.
_NAME = "hidden_noise"


class HiddenNoise(nn.Module):
    """Multiplies the weights with which a recurrent layer reads its hidden units.

    Args:
        noise: Noise on the units.
        index: Which unit each hidden unit is, a block for every layer and direction;
            `noise.num_features` stands for hidden units that have no noise.
    """

    index: Tensor

    def __init__(self, noise: UnitNoise, index: Tensor):
        super().__init__()
        self.noise = noise
        self.register_buffer("index", index)

    def forward(self, layer: Any, args: tuple[Any, ...]) -> None:
        """Let torch's layer read its units with noise: a forward pre-hook."""
        names = layer._flat_weights_names
        weights = [getattr(layer, name) for name in names]
        layer._flat_weights = self.scaled(layer, dict(zip(names, weights, strict=True)), args[0])

    def restore(self, layer: Any, args: Any, output: Any) -> None:
        """Let it have its weights back: a forward hook."""
        layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]

    def scaled(self, layer: Any, weights: dict[str, Tensor], input: Any) -> list[Tensor]:
        """The weights for a call, in their order."""
        data = input.data if isinstance(input, PackedSequence) else input
        drawn = self.noise.scale_for(data.reshape(-1, data.shape[-1])[:1])
        return list(self._multiplied(layer, weights, drawn.view(-1)).values())

    @torch.no_grad()
    def fold_(self, layer: Any, per_unit: Tensor) -> None:
        """Multiply the weights of torch's layer for good."""
        names = [name for name in layer._flat_weights_names if name.startswith("weight")]
        weights = {name: getattr(layer, name) for name in names}
        for name, weight in self._multiplied(layer, weights, per_unit).items():
            setattr(layer, name, nn.Parameter(weight.detach(), weights[name].requires_grad))

    def _multiplied(
        self, layer: Any, weights: dict[str, Tensor], per_unit: Tensor
    ) -> dict[str, Tensor]:
        padded = torch.cat([per_unit, per_unit.new_ones(1)])
        directions = ("", "_reverse") if layer.bidirectional else ("",)
        # (layers, directions, units)
        scale = padded[self.index].view(layer.num_layers, len(directions), -1)
        scaled = dict(weights)
        for level in range(layer.num_layers):
            for number, direction in enumerate(directions):
                own, below = f"weight_hh_l{level}{direction}", f"weight_ih_l{level}{direction}"
                scaled[own] = weights[own] * scale[level, number].to(weights[own].dtype)
                if level:
                    factor = scale[level - 1].flatten().to(weights[below].dtype)
                    scaled[below] = weights[below] * factor
        return scaled


def attach_hidden_(layer: nn.Module, hidden_noise: HiddenNoise) -> None:
    """Let a recurrent layer read its hidden units with noise; ours look for it themselves."""
    layer.add_module(_NAME, hidden_noise)
    if not isinstance(layer, RecurrentLayer):
        # In front of that on inputs, in whatever order they come: a seed draws the same.
        layer.register_forward_pre_hook(hidden_noise, prepend=True)
        layer.register_forward_hook(hidden_noise.restore, always_call=True)


def hidden_noise_of(layer: nn.Module) -> HiddenNoise | None:
    """The noise on what a recurrent layer reads of itself, if there is any."""
    found = layer._modules.get(_NAME)
    return found if isinstance(found, HiddenNoise) else None


def hidden_noises(model: nn.Module) -> dict[str, HiddenNoise]:
    """All noise of this kind, by the names of the layers."""
    found = {name: hidden_noise_of(module) for name, module in model.named_modules()}
    return {name: noise for name, noise in found.items() if noise is not None}


def take_hidden_noise_(model: nn.Module) -> dict[str, HiddenNoise]:
    """Take the noise off all layers, and return it by their names."""
    taken = hidden_noises(model)
    for name, noise in taken.items():
        layer = model.get_submodule(name)
        del layer._modules[_NAME]
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            for key in [k for k, h in hooks.items() if getattr(h, "__self__", h) is noise]:
                del hooks[key]
                layer._forward_hooks_always_called.pop(key, None)
    return taken
