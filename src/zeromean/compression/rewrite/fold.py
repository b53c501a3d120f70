"""Less to compute, whatever is pruned: multipliers in the weights, and one constant for many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from zeromean.compression.graph.network import Network, lone_source
from zeromean.compression.graph.roles import Role
from zeromean.compression.plan import Folded
from zeromean.compression.rewrite.resize import resized
from zeromean.compression.units.layout import Units
from zeromean.compression.units.reading import foldable, reads, scale_and_shift, taps
from zeromean.layers.stochastic_layer import StochasticLayer


def fold_scales_(network: Network, known: dict[fx.Node, Units]) -> bool:
    """Take BatchNorm and multipliers of units into the weights before (or behind) them.

    Returns whether it has changed the network.
    """
    changed = False
    for node in [n for n in known if network.role(n) in (Role.NORM, Role.SCALE)]:
        role = network.role(node)
        scale, shift = scale_and_shift(network.layer(node))
        source = lone_source(node)
        if role is Role.SCALE and (scale >= 0).all():
            while source is not None and _is_homogeneous(network, source):
                source = lone_source(source)
        if source is not None and _makes_units(network, source, len(scale)):
            _fold_back_(network, node, source, scale, shift)
            changed = True
        elif role is Role.SCALE:
            changed |= _fold_forward_(network, node, known[node], scale)
    return changed


def merge_constants_(network: Network, known: dict[fx.Node, Units]) -> bool:
    """Let one constant channel stand for all in front of convolutions that cannot fold them.

    Behind zero padding a constant other than zero adds less at the border, so it cannot go into the
    bias. But all constants have their border alike: one channel, with a kernel that is the sum of
    theirs, does for all. Returns whether it has changed the network.
    """
    changed = False
    for node in network.nodes:
        layer = network.layer(node)
        if network.role(node) is not Role.AFFINE or isinstance(layer, StochasticLayer):
            continue
        source = known.get(node.all_input_nodes[0])
        if source is None or not reads(layer, source):
            continue
        stuck = ~source.constants.isnan() & ~foldable(layer, source)
        stuck &= (taps(layer) != 0).any(2).any(0)
        if stuck.sum() > 1:
            weight = _merged(layer, stuck, torch.where(stuck, source.constants, 0.0))
            new = network.replace_(node, resized(layer, weight, layer.bias))
            known[new] = known.pop(node)
            changed = True
    return changed


def _fold_back_(
    network: Network, node: fx.Node, source: fx.Node, scale: Tensor, shift: Tensor
) -> None:
    maker = network.layer(source)
    dim = 1 if getattr(maker, "transposed", False) else 0
    bias = shift if maker.bias is None else shift + scale * maker.bias
    folded = resized(maker, _times(maker.weight, scale, dim), bias.to(maker.weight.dtype))
    network.decide_(node, Folded(network.layer_name(source)))
    network.replace_(node, None)
    network.replace_(source, folded)


def _fold_forward_(network: Network, node: fx.Node, here: Units, scale: Tensor) -> bool:
    layers = {user: network.layer(user) for user in node.users}
    for user, layer in layers.items():
        if network.role(user) is not Role.AFFINE or isinstance(layer, StochasticLayer):
            return False
        if not reads(layer, here):
            return False
    for user, layer in layers.items():
        dim = 0 if getattr(layer, "transposed", False) else 1
        weight = _times(layer.weight, scale, dim)
        network.decide_(node, Folded(network.layer_name(user)))
        network.replace_(user, resized(layer, weight, layer.bias))
    network.replace_(node, None)
    return True


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


def _makes_units(network: Network, node: fx.Node, number: int) -> bool:
    role, layer = network.role(node), network.layer(node)
    if role not in (Role.AFFINE, Role.DEPTHWISE, Role.GROUPED):
        return False
    if isinstance(layer, StochasticLayer) or (role is Role.GROUPED and layer.transposed):
        return False
    return len(taps(layer)) == number


def _is_homogeneous(network: Network, node: fx.Node) -> bool:
    """Whether a positive multiplier of a unit may as well stand in front."""
    operation = network[node].operation
    known = network.role(node) is not Role.OTHER
    return known and operation is not None and operation.homogeneous


def _times(weight: Tensor, scale: Tensor, dim: int) -> Tensor:
    shape = [1] * weight.dim()
    shape[dim] = -1
    return (weight * scale.to(weight.dtype).view(shape)).detach()
