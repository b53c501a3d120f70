"""Which layers are multiplied sparsely, and which ones share one arrangement of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from zeromean.compression.graph.annotations import has_hooks
from zeromean.compression.graph.network import Network
from zeromean.compression.graph.operations import role_of
from zeromean.compression.graph.roles import Role
from zeromean.compression.modules.adapters import SelectInputs
from zeromean.compression.modules.batch_last import BatchLast
from zeromean.compression.modules.sparse_layers import SparseConv2d, SparseLinear, is_simple
from zeromean.compression.rewrite.resize import with_units
from zeromean.compression.units.reading import taps
from zeromean.compression.units.recurrent import inputs_read, recurrent_with_inputs
from zeromean.layers.linear import Linear

# Rules from measurements on one thread, for batches from 1 to 256.
_SPARSE_LINEAR = 1 / 16  # largest part of the weights that is left
_SPARSE_CONVOLUTION = 1 / 2
_SMALLEST_SPARSE = 2**12  # weights of a Linear layer
_FEW_CHANNELS = 4  # on which torch's convolutions are slow, with the pooling behind them
_PART_WORTH_SELECTING = 1 / 4  # smallest part of the inputs that nobody reads


def choose_layers_(network: Network) -> None:
    """Make layers sparse where that is faster, and select inputs in front of the dense ones."""
    for node in network.nodes:
        role, layer = network.role(node), network.layer(node)
        if role is Role.RECURRENT:
            read = inputs_read(layer)
            if _pays_to_select(read):
                _select_inputs_(network, node, read, recurrent_with_inputs(layer, read))
        elif role is Role.AFFINE:
            _choose_affine_(network, node, layer)


def could_be_sparse(layer: Any) -> bool:
    """Whether there is a sparse twin that would be faster, if few of the weights were left."""
    if has_hooks(layer):
        return False
    if type(layer) is nn.Linear:
        return layer.weight.numel() >= _SMALLEST_SPARSE
    return type(layer) is nn.Conv2d and is_simple(layer)


def sparse_twin(layer: Any) -> Any:
    """The sparse twin of a layer where that is faster, else the layer itself."""
    if not could_be_sparse(layer):
        return layer
    if type(layer) is nn.Linear:
        few = _density(layer.weight) <= _SPARSE_LINEAR
        return SparseLinear(layer.weight.detach(), layer.bias) if few else layer
    return SparseConv2d(layer) if _density(layer.weight) <= _SPARSE_CONVOLUTION else layer


def join_chains_(network: Network) -> None:
    """Make one `BatchLast` of modules that follow each other, where one of them is sparse."""
    joined: set[fx.Node] = set()
    for node in network.nodes:
        if node in joined:
            continue
        chain = _chain_from(network, node)
        modules = [network.layer(member) for member in chain]
        if any(isinstance(module, (SparseLinear, SparseConv2d)) for module in modules):
            joined.update(chain)
            _join_(network, chain, modules)


def _chain_from(network: Network, node: fx.Node) -> list[fx.Node]:
    """The longest chain that starts at a node: a layer, with the Flatten in front of it."""
    layer = network.layer(node)
    if layer is None or has_hooks(layer):
        return []
    if type(layer) is nn.Conv2d:
        images = is_simple(layer) and layer.in_channels <= _FEW_CHANNELS
        if not images:
            return []
    elif type(layer) in (nn.Linear, SparseLinear, SparseConv2d):
        images = type(layer) is SparseConv2d
    else:
        return []
    chain = [node]
    source = node.all_input_nodes[0]
    if not images and _is_flatten(network.layer(source)) and len(source.users) == 1:
        chain.insert(0, source)
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        layer = network.layer(user)
        if len(user.all_input_nodes) != 1 or len(user.args) != 1 or user.kwargs:
            break
        if layer is None or has_hooks(layer):
            break
        if images and _is_flatten(layer):
            images = False
        elif not (role_of(layer) is Role.POINTWISE or _fits(layer, images)):
            break
        chain.append(user)
    return chain


def _fits(layer: Any, images: bool) -> bool:
    if not images:
        return type(layer) in (nn.Linear, SparseLinear)
    if type(layer) is nn.MaxPool2d:
        padding = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,)
        return not (any(padding) or layer.ceil_mode or layer.return_indices)
    return type(layer) is SparseConv2d


def _join_(network: Network, chain: list[fx.Node], modules: list[Any]) -> None:
    steps: dict[str, nn.Module] = {}
    for node, module in zip(chain, modules, strict=True):
        name = network[node].name
        while name in steps:  # A module that is called twice.
            name += "_"
        steps[name] = SparseConv2d(module) if type(module) is nn.Conv2d else module
    network.join_(chain, BatchLast(steps), list(steps))


def _choose_affine_(network: Network, node: fx.Node, layer: Any) -> None:
    twin = sparse_twin(layer)
    if twin is not layer:
        network.replace_(node, twin)
    elif isinstance(layer, (nn.Linear, Linear)):
        weight = taps(layer)
        read = (weight != 0).any(2).any(0)
        if _pays_to_select(read):
            outputs = torch.ones(len(weight), dtype=torch.bool, device=read.device)
            _select_inputs_(network, node, read, with_units(layer, outputs, read))


def _pays_to_select(read: Tensor) -> bool:
    return bool(read.any()) and float((~read).float().mean()) >= _PART_WORTH_SELECTING


def _select_inputs_(network: Network, node: fx.Node, read: Tensor, smaller: nn.Module) -> None:
    select = SelectInputs(read.nonzero().flatten(), len(read))
    network.select_input_(node, select, "_inputs")
    network.replace_(node, smaller)


def _is_flatten(layer: Any) -> bool:
    dims = type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
    return dims and not has_hooks(layer)


def _density(weight: Tensor) -> float:
    return float(weight.count_nonzero()) / max(weight.numel(), 1)
