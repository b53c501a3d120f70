"""Which units of a network are constant.

A unit is constant when it has the same value for every input and at every position: its weights
are pruned, or all that they read is constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from zeromean.compression.graph.network import Network
from zeromean.compression.graph.roles import Role
from zeromean.compression.units.layout import REARRANGING, Units, concatenated_dim, rearranged
from zeromean.compression.units.reading import foldable, reads, scale_and_shift, taps
from zeromean.compression.units.recurrent import silent_units
from zeromean.compression.units.sources import features_behind, unbundled, unit_sources
from zeromean.distributions.posteriors.factorized import independent
from zeromean.layers.linear import Linear
from zeromean.layers.stochastic_layer import StochasticLayer


def units(network: Network) -> dict[fx.Node, Units]:
    """The units of every node whose output has such."""
    known: dict[fx.Node, Units] = {}
    for node in network.nodes:
        found = _units_of(network, node, known)
        if found is not None and (found := _as_seen(network, node, found)):
            known[node] = found
    return known


def _units_of(network: Network, node: fx.Node, known: dict[fx.Node, Units]) -> Units | None:
    role, layer = network.role(node), network.layer(node)
    sources = [known.get(source) for source in unit_sources(network, node)]
    sources = [None if s is None else replace(s, assumes=None) for s in sources]
    if role is Role.AFFINE:
        return _affine(layer, sources[0], _dims_in_front(network, node, sources[0]))
    if role in (Role.DEPTHWISE, Role.GROUPED):
        return _of_groups(layer, sources[0], alone=role is Role.DEPTHWISE)
    if role is Role.EMBEDDING:
        return _looked_up(layer)
    if role is Role.RECURRENT:
        return _recurrent(layer, sources[0])
    if role in (Role.OTHER, Role.BUNDLE):
        return None
    complete = [s for s in sources if s is not None]
    if len(complete) < len(sources):
        return None
    source = complete[0]
    if role is Role.POINTWISE:
        return source.with_constants(_pointwise(node, layer, source.constants))
    if role in (Role.NORM, Role.SCALE):
        return _scaled(layer, source)
    if role is Role.RESAMPLE:
        return None if source.last else source
    if role is Role.AVERAGE_POOL:
        return None if source.last else _averaged(layer, source)
    if role is Role.FLATTEN:
        shape = network[node].shape
        return _flattened(source, shape[1] if shape else features_behind(network, node))
    if role is Role.GUARD:
        return source
    if role in REARRANGING:
        return rearranged(role, node, source)
    if role is Role.STATES:
        return _states(network, node, source)
    if role is Role.CAT:
        return _concatenated(node, complete)
    operation = network[node].operation
    assert operation is not None
    return _combined(node, *complete, product=operation.product)


def _affine(layer: Any, source: Units | None, dims: tuple[int | None, bool]) -> Units:
    weight, last = taps(layer), isinstance(layer, (nn.Linear, Linear))
    dims = dims if last else (_dims_of_images(layer), True)
    if source is None or not reads(layer, source):
        source = Units(weight.new_full((weight.shape[1],), math.nan), last, *dims)
    folded = foldable(layer, source)
    varies = (weight[:, ~folded] != 0).flatten(1).any(1)
    outputs = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
    if not isinstance(layer, StochasticLayer):
        outputs = outputs + weight[:, folded].sum(2) @ source.constants[folded]
    return Units(torch.where(varies, math.nan, outputs), last, *dims)


def _of_groups(layer: Any, source: Units | None, *, alone: bool) -> Units:
    if getattr(layer, "transposed", False):
        nothing = taps(layer).new_full((layer.out_channels,), math.nan)
        return Units(nothing, False, _dims_of_images(layer), True)
    weight = taps(layer).flatten(1)
    outputs = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
    varies = (weight != 0).any(1)
    if alone and source is not None and reads(layer, source):
        repeats = layer.out_channels // layer.in_channels
        folded = foldable(layer, source).repeat_interleave(repeats)
        if not isinstance(layer, StochasticLayer):
            values = source.constants.repeat_interleave(repeats)
            outputs = outputs + torch.where(folded, weight.sum(1) * values, 0.0)
        varies &= ~folded
    return Units(torch.where(varies, math.nan, outputs), False, _dims_of_images(layer), True)


def _looked_up(layer: Any) -> Units:
    if isinstance(layer, StochasticLayer):
        scale = independent(layer.weight, "zm.compress").mean_and_scale()[1].detach()
        constants = torch.where((scale != 0).any(0), math.nan, scale[0])
    else:
        rows = layer.weight.detach()
        constants = torch.where((rows == rows[0]).all(0), rows[0], math.nan)
    return Units(constants, True, _DIMS_OF_SEQUENCES, False)


def _recurrent(layer: Any, source: Units | None) -> Units:
    inputs = layer.weight_ih_l0.new_full((layer.input_size,), math.nan)
    if source is not None and reads(layer, source):
        inputs = source.constants
    silent = silent_units(layer, inputs).flatten()
    return Units(inputs.new_zeros(()).where(silent, math.nan), True, None, False)


def _states(network: Network, node: fx.Node, source: Units) -> Units:
    blocks, recurrent = network[node].blocks, unbundled(network, node.all_input_nodes[0])
    assert blocks is not None
    size = network.layer(recurrent).hidden_size
    part = source.constants[blocks.start * size : blocks.stop * size]
    of_all_steps = node.all_input_nodes[0] is recurrent
    return Units(part, True, _DIMS_OF_SEQUENCES if of_all_steps else 2, False)


def _pointwise(node: fx.Node, layer: Any, values: Tensor) -> Tensor:
    # A copy for what works in place, and NaN whatever it makes of it.
    changed = _called(node, repeat(values)) if layer is None else layer(values.clone())
    return torch.where(values.isnan(), values, changed)


def _called(node: fx.Node, values: Iterator[Tensor]) -> Tensor:
    """What the function of a node makes of these in place of its inputs."""
    arguments: Any = map_arg((node.args, node.kwargs), lambda _: next(values).clone())
    args, kwargs = arguments
    call: Any = node.target
    call = getattr(Tensor, call) if node.op == "call_method" else call
    return call(*args, **kwargs)


def _scaled(layer: Any, source: Units) -> Units | None:
    scale, shift = scale_and_shift(layer)
    if len(scale) != len(source):
        return None
    changed = torch.where(scale == 0, shift, source.constants * scale + shift)
    source = source.with_constants(changed.to(source.constants.dtype))
    if not source.last:
        return source
    # Along dimension 1, which is the last one of (N, F): likely, for (N, T, F) needs T = F.
    rows = (replace(source, dims=2) if source.dims is None else source).with_dims(2, 2)
    return None if rows is None else replace(rows, proven=True)


def _averaged(layer: Any, source: Units) -> Units:
    values = source.constants
    constant = _keeps_constants(layer) | (values == 0)
    return source.with_constants(torch.where(constant, values, math.nan))


def _flattened(source: Units, features: int | None) -> Units | None:
    if features is None or features % len(source):
        return None
    positions = features // len(source)
    if source.last:
        return Units(source.constants.repeat(positions), True, 2, True)
    return Units(source.constants.repeat_interleave(positions), True, 2, True)


def _concatenated(node: fx.Node, sources: list[Units]) -> Units | None:
    dim = concatenated_dim(node)
    first = replace(sources[0], proven=all(source.proven for source in sources))
    if any((s.last, s.dims) != (first.last, first.dims) for s in sources):
        return None
    if not first.last:
        assert first.dims is not None
        supposed = first if dim % first.dims == 1 else None
    else:
        supposed = first if dim == -1 else first.with_dims(dim + 1, dim + 1)
    if supposed is None:
        return None
    return supposed.with_constants(torch.cat([s.constants for s in sources]))


def _combined(node: fx.Node, first: Units, second: Units, *, product: bool) -> Units | None:
    if (first.last, len(first)) != (second.last, len(second)):
        return None
    same = first.dims == second.dims
    if not (same or first.last):
        return None
    ours, theirs = first.constants, second.constants
    values = _called(node, iter((ours, theirs)))
    if product:
        values = torch.where((ours == 0) | (theirs == 0), 0.0, values)
    proven = same and first.proven and second.proven
    return replace(first, constants=values, dims=first.dims if same else None, proven=proven)


def _as_seen(network: Network, node: fx.Node, found: Units) -> Units | None:
    """With the dimensions that the node had for an example."""
    shape = network[node].shape
    if shape is None:
        return found
    if not found.proven:
        return replace(found, dims=len(shape))
    # One less would be an image without a batch, whose channels lie along dimension 0.
    return found if found.dims == len(shape) else None


def _dims_in_front(
    network: Network, node: fx.Node, source: Units | None
) -> tuple[int | None, bool]:
    """How many dimensions the input of a node has, and whether for every input."""
    if source is not None and source.dims is not None:
        return source.dims, source.proven
    before = node.all_input_nodes[0]
    if network.role(before) is Role.FLATTEN:
        return 2, True
    if before.op == "call_method" and before.target in ("view", "reshape") and len(before.args) > 2:
        return len(before.args) - 1, True
    return None, False


def _dims_of_images(layer: Any) -> int:
    return len(layer.kernel_size) + 2


def _keeps_constants(layer: Any) -> bool:
    """Whether an average over windows of a constant is the constant, at the border too."""
    if not hasattr(layer, "padding"):
        return True  # Adaptive pooling has windows inside the image only.
    padding = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,)
    no_zeros = not any(padding) or not layer.count_include_pad
    return no_zeros and getattr(layer, "divisor_override", None) is None


_DIMS_OF_SEQUENCES = 3  # (N, T, F), with a batch as most have it.
