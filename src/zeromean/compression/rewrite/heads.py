"""Forward functions that make heads themselves, with fewer of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from zeromean.compression.graph.network import Network
from zeromean.compression.plan import HeadsLeft
from zeromean.compression.rewrite.resize import with_units
from zeromean.compression.units.heads import TracedHeads, traced_heads
from zeromean.prediction.inputs import Inputs


def narrow_heads_(network: Network, example_inputs: Inputs | None) -> None:
    """Take out the heads that nobody reads, and write the new sizes into views."""
    for heads in traced_heads(network, example_inputs):
        read = heads_read(network, heads)
        if not read.all():
            _narrow_(network, heads, read)


def heads_read(network: Network, heads: TracedHeads) -> Tensor:
    """Which heads the linear layer behind them reads; one at least, so that shapes stay whole."""
    of_inputs = (network.layer(heads.reader).weight != 0).any(0).cpu()
    read = torch.zeros(heads.number, dtype=torch.bool)
    read[heads.read[of_inputs]] = True
    read[0] |= not read.any()
    return read


def _narrow_(network: Network, heads: TracedHeads, keep: Tensor) -> None:
    left = int(keep.sum())
    for node, of_features in heads.moved.items():
        _resize_(node, of_features, heads, left)
    decision = HeadsLeft(heads.number - left, heads.number)
    for node, of_units in heads.makers.items():
        layer = network.layer(node)
        network.decide_(node, decision)
        network.exchange_(node, with_units(layer, keep[of_units].to(layer.weight.device)))
    layer = network.layer(heads.reader)
    everything = torch.ones(layer.out_features, dtype=torch.bool, device=layer.weight.device)
    inputs = keep[heads.read].to(layer.weight.device)
    network.exchange_(heads.reader, with_units(layer, everything, inputs))


def _resize_(node: fx.Node, of_features: Any, heads: TracedHeads, left: int) -> None:
    """Write the sizes that a node makes into it, where they depend on the number of heads."""
    name = getattr(node.target, "__name__", node.target)
    parts = of_features if isinstance(of_features, (tuple, list)) else (of_features,)
    dim = _dim_of_heads(parts[0])

    def new(tensor: Tensor) -> int:
        return tensor.shape[dim] * left // heads.number

    every: Any = node.args
    options: Any = dict(node.kwargs)
    source, *arguments = every
    if name in ("view", "reshape"):
        listed = isinstance(arguments[0], (tuple, list)) if arguments else False
        sizes: list[Any] = list(arguments[0] if listed else arguments)
        sizes = sizes or list(options.get("shape", options.get("size", ())))
        sizes[dim] = sizes[dim] if sizes[dim] == -1 else new(parts[0])
        node.args, node.kwargs = (source, tuple(sizes)), {}
    elif name == "unflatten":
        names = dict(zip(("dim", "sizes"), arguments, strict=False)) | options
        sizes = list(names["sizes"])
        first = names["dim"] % (parts[0].dim() - len(sizes) + 1)
        if 0 <= dim - first < len(sizes) and sizes[dim - first] != -1:
            sizes[dim - first] = new(parts[0])
        node.args, node.kwargs = (source, names["dim"], tuple(sizes)), {}
    elif name == "split":
        along = options.get("dim", arguments[1] if len(arguments) > 1 else 0)
        if along % parts[0].dim() == dim:
            node.args, node.kwargs = (source, [new(part) for part in parts], along), {}


def _dim_of_heads(of_features: Tensor) -> int:
    """The dimension along which features belong to different heads."""
    for dim in range(of_features.dim()):
        if (of_features != of_features.select(dim, 0).unsqueeze(dim)).any():
            return dim
    return 0
