"""What flows through a network: which units are constant, and which ones anybody needs.

The network is a graph of modules (`graph.py`). The units of an activation are the features of
`(N, F)` and the channels of `(N, C, *)`. A unit is constant when it has the same value for every
input and at every position: its weights are pruned, or all that they read is constant. It is
needed when something reads it that cannot take the constant into its bias. Everything else can be
removed, which is what `zm.compress` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zeromean.compression.graph import Role, features_behind, layer_of, role_of
from zeromean.layers import Linear, StochasticLayer


@dataclass(frozen=True)
class Units:
    """The units of one activation.

    Attributes:
        constants: The value of every unit that is constant, NaN for the others.
        last: Whether they lie along the last dimension (behind a Linear layer), not along
            dimension 1.
    """

    constants: Tensor
    last: bool

    def __len__(self) -> int:
        return len(self.constants)


def units(network: fx.GraphModule) -> dict[fx.Node, Units]:
    """The units of every node whose output has such."""
    known: dict[fx.Node, Units] = {}
    for node in network.graph.nodes:
        found = _units_of(network, node, known)
        if found is not None:
            known[node] = found
    return known


def needed(network: fx.GraphModule, known: dict[fx.Node, Units]) -> dict[fx.Node, Tensor]:
    """Which units of every node must be there. At least one is, so that shapes stay whole."""
    need = {n: torch.zeros_like(u.constants, dtype=torch.bool) for n, u in known.items()}
    _spread_needs_(network, known, need)
    while True:
        empty = next((present for present in need.values() if not present.any()), None)
        if empty is None:
            return need
        empty[0] = True
        _spread_needs_(network, known, need)


def reads(layer: Any, source: Units | None) -> bool:
    """Whether the inputs of a layer are the units of an activation, one by one."""
    if source is None or source.last != isinstance(layer, (nn.Linear, Linear)):
        return False
    return len(source) == (layer.in_features if source.last else layer.in_channels)


def foldable(layer: Any, source: Units) -> Tensor:
    """Which constant inputs a layer can take into its bias: exactly, at every position."""
    if isinstance(layer, StochasticLayer) or not _is_uniform(layer):
        # Noise multiplies whatever is there, and zeros around an image are not the constant.
        return source.constants == 0
    return ~source.constants.isnan()


def taps(layer: Any) -> Tensor:
    """The weight of a layer as `(outputs, inputs, places)`; for a variance layer its scale."""
    if isinstance(layer, StochasticLayer):
        weight = layer.weight.mean_and_scale()[1]
    else:
        weight = layer.weight
    if getattr(layer, "transposed", False):
        weight = weight.transpose(0, 1)
    return weight.detach().flatten(2) if weight.dim() > 2 else weight.detach().unsqueeze(2)


def _units_of(network: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Units]) -> Units | None:
    role, layer = role_of(network, node), layer_of(network, node)
    sources = [known.get(source) for source in node.all_input_nodes]
    source = sources[0] if sources else None
    if role is Role.AFFINE:
        return _affine(layer, source)
    if source is None:
        return None
    values = source.constants
    if role is Role.POINTWISE:
        # A copy for modules that work in place, and NaN whatever they make of it.
        return _changed(source, torch.where(values.isnan(), values, layer(values.clone())))
    if role is Role.NORM:
        if layer.num_features != len(source):
            return None
        positions = [1] * _NUM_POSITIONS.get(type(layer), 0)
        return _changed(source, layer(values.view(1, -1, *positions)).flatten())
    if role is Role.SCALE:
        if layer.scale.numel() != len(source):
            return None
        return _changed(source, torch.where(layer.scale == 0, 0.0, values * layer.scale))
    if role is Role.MAX_POOL and not source.last:
        return source
    if role is Role.AVERAGE_POOL and not source.last:
        constant = _keeps_constants(layer) | (values == 0)
        return _changed(source, torch.where(constant, values, math.nan))
    if role is Role.FLATTEN:
        return _flattened(source, features_behind(network, node))
    if role is Role.ADD:
        other = sources[-1]
        if other is not None and (other.last, len(other)) == (source.last, len(source)):
            return _changed(source, values + other.constants)
    return None


def _affine(layer: Any, source: Units | None) -> Units:
    weight, last = taps(layer), isinstance(layer, (nn.Linear, Linear))
    if source is None or not reads(layer, source):
        source = Units(weight.new_full((weight.shape[1],), math.nan), last)
    folded = foldable(layer, source)
    varies = (weight[:, ~folded] != 0).flatten(1).any(1)
    outputs = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias
    if not isinstance(layer, StochasticLayer):
        outputs = outputs + weight[:, folded].sum(2) @ source.constants[folded]
    return Units(torch.where(varies, math.nan, outputs), last)


def _flattened(source: Units, features: int | None) -> Units | None:
    if features is None or features % len(source):
        return None
    positions = features // len(source)
    if source.last:  # More than one position would be a sequence, with its units innermost.
        return source if positions == 1 else None
    return Units(source.constants.repeat_interleave(positions), last=True)


def _changed(source: Units, constants: Tensor) -> Units:
    return Units(constants, source.last)


def _spread_needs_(
    network: fx.GraphModule, known: dict[fx.Node, Units], need: dict[fx.Node, Tensor]
) -> None:
    """From what is read to what must be there, until nothing changes."""
    before = -1
    while before != (before := sum(int(present.sum()) for present in need.values())):
        for node in reversed(network.graph.nodes):
            for source in node.all_input_nodes:
                if source in need:
                    _spread_need_(network, node, source, known, need)


def _spread_need_(
    network: fx.GraphModule,
    node: fx.Node,
    source: fx.Node,
    known: dict[fx.Node, Units],
    need: dict[fx.Node, Tensor],
) -> None:
    role, layer = role_of(network, node), layer_of(network, node)
    if node not in need:
        need[source].fill_(True)
    elif role is Role.AFFINE:
        if reads(layer, known[source]):
            read = (taps(layer)[need[node]] != 0).any(2).any(0)
            need[source] |= read & ~foldable(layer, known[source])
        else:
            need[source].fill_(True)
    elif role is Role.FLATTEN:
        per_unit = need[node].view(len(need[source]), -1)
        need[source] |= per_unit.any(1)
        per_unit |= need[source].unsqueeze(1)
    else:
        # One to one: what one has, the other has.
        need[source] |= need[node]
        need[node] |= need[source]


def _is_uniform(layer: Any) -> bool:
    """Whether a constant input adds the same to the output at every position."""
    if isinstance(layer, nn.Linear):
        return True
    if layer.transposed:
        return False
    return layer.padding_mode != "zeros" or not any(layer._reversed_padding_repeated_twice)


def _keeps_constants(layer: Any) -> bool:
    """Whether an average over windows of a constant is the constant, at the border too."""
    if not hasattr(layer, "padding"):
        return True  # Adaptive pooling has windows inside the image only.
    padding = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,)
    no_zeros = not any(padding) or not layer.count_include_pad
    return no_zeros and getattr(layer, "divisor_override", None) is None


_NUM_POSITIONS = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
