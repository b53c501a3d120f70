"""Less to compute, whatever is pruned: multipliers in the weights, and one constant for many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from zeromean.compression.graph.edit import layer_of, lone_source, replace_node_
from zeromean.compression.rewrite.resize import resized
from zeromean.compression.units.constants import units
from zeromean.compression.units.layout import Units
from zeromean.compression.units.reading import foldable, reads, scale_and_shift, taps
from zeromean.compression.units.roles import Role, role_of
from zeromean.layers.stochastic_layer import StochasticLayer


def fold_scales_(network: fx.GraphModule) -> None:
    """Take BatchNorm and multipliers of units into the weights before (or behind) them."""
    known = units(network)
    for node in list(network.graph.nodes):
        role = role_of(network, node)
        if role not in (Role.NORM, Role.SCALE) or node not in known:
            continue
        scale, shift = scale_and_shift(layer_of(network, node))
        source = lone_source(node)
        if role is Role.SCALE and (scale >= 0).all():
            while source is not None and _is_homogeneous(network, source):
                source = lone_source(source)
        if source is not None and _makes_units(network, source, len(scale)):
            _fold_back_(network, node, source, scale, shift)
        elif role is Role.SCALE:
            _fold_forward_(network, node, known[node], scale)


def merge_constants_(network: fx.GraphModule) -> None:
    """Let one constant channel stand for all in front of convolutions that cannot fold them.

    Behind zero padding a constant other than zero adds less at the border, so it cannot go into the
    bias. But all constants have their border alike: one channel, with a kernel that is the sum of
    theirs, does for all.
    """
    known = units(network)
    for node in list(network.graph.nodes):
        layer = layer_of(network, node)
        if role_of(network, node) is not Role.AFFINE or isinstance(layer, StochasticLayer):
            continue
        source = known.get(node.all_input_nodes[0])
        if source is None or not reads(layer, source):
            continue
        stuck = ~source.constants.isnan() & ~foldable(layer, source)
        stuck &= (taps(layer) != 0).any(2).any(0)
        if stuck.sum() > 1:
            weight = _merged(layer, stuck, torch.where(stuck, source.constants, 0.0))
            new = replace_node_(network, node, resized(layer, weight, layer.bias))
            known[new] = known.pop(node)


def _fold_back_(
    network: fx.GraphModule, node: fx.Node, source: fx.Node, scale: Tensor, shift: Tensor
) -> None:
    maker = layer_of(network, source)
    dim = 1 if getattr(maker, "transposed", False) else 0
    bias = shift if maker.bias is None else shift + scale * maker.bias
    folded = resized(maker, _times(maker.weight, scale, dim), bias.to(maker.weight.dtype))
    _note_(node, source)
    replace_node_(network, node, None)
    replace_node_(network, source, folded)


def _fold_forward_(network: fx.GraphModule, node: fx.Node, here: Units, scale: Tensor) -> None:
    layers = {user: layer_of(network, user) for user in node.users}
    for user, layer in layers.items():
        if role_of(network, user) is not Role.AFFINE or isinstance(layer, StochasticLayer):
            return
        if not reads(layer, here):
            return
    for user, layer in layers.items():
        dim = 0 if getattr(layer, "transposed", False) else 1
        weight = _times(layer.weight, scale, dim)
        _note_(node, user)
        replace_node_(network, user, resized(layer, weight, layer.bias))
    replace_node_(network, node, None)


def _note_(folded: fx.Node, into: fx.Node) -> None:
    into.meta["holds"] = [*into.meta.get("holds", []), folded]


def _merged(layer: Any, stuck: Tensor, constants: Tensor) -> Tensor:
    """The weight with the kernels of all constant inputs at the largest one of them."""
    weight = layer.weight.detach().clone()
    kernels = weight if layer.transposed else weight.transpose(0, 1)  # (inputs, outputs, *)
    largest = int(constants.abs().argmax())
    shares = (constants / constants[largest]).to(weight.dtype)
    together = torch.tensordot(shares[stuck], kernels[stuck], 1)
    kernels[stuck] = 0.0
    kernels[largest] = together
    return weight


def _makes_units(network: fx.GraphModule, node: fx.Node, number: int) -> bool:
    role, layer = role_of(network, node), layer_of(network, node)
    if role not in (Role.AFFINE, Role.DEPTHWISE, Role.GROUPED):
        return False
    if isinstance(layer, StochasticLayer) or (role is Role.GROUPED and layer.transposed):
        return False
    return len(taps(layer)) == number


def _is_homogeneous(network: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a positive multiplier of a unit may as well stand in front."""
    layer = layer_of(network, node)
    if type(layer) in (nn.ReLU, nn.LeakyReLU):
        return True
    return role_of(network, node) in (Role.RESAMPLE, Role.AVERAGE_POOL)


def _times(weight: Tensor, scale: Tensor, dim: int) -> Tensor:
    shape = [1] * weight.dim()
    shape[dim] = -1
    return (weight * scale.to(weight.dtype).view(shape)).detach()
