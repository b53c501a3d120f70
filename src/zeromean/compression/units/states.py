"""Who reads the states of LSTM and GRU.

The units of a recurrent layer are those of all its layers and directions: a block for each, in the
order of torch's last states. `output, last = layer(input)` is taken apart by subscripts.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from zeromean.compression.graph.edit import layer_of, obstacle


def is_recurrent(network: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node runs a plain recurrent layer from a zero state."""
    layer = layer_of(network, node)
    known = type(layer) in (nn.LSTM, nn.GRU) and layer.proj_size == 0
    return known and obstacle(network, node) is None


def blocks_of(layer: nn.RNNBase) -> int:
    """How many layers and directions there are."""
    return layer.num_layers * (2 if layer.bidirectional else 1)


def states_read(network: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, range] | None:
    """The recurrent layer whose output or last state a node picks, and its blocks."""
    if not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    index = node.args[1] if node.target is operator.getitem else None
    if is_recurrent(network, source):
        layer = layer_of(network, source)
        blocks = blocks_of(layer)
        if index == 0:
            return source, range(blocks - blocks // layer.num_layers, blocks)
        return None
    recurrent = bundle_of(network, source)
    if recurrent is None or not _is_tensor(network, source):
        return None
    blocks = blocks_of(layer_of(network, recurrent))
    if isinstance(index, int):
        return recurrent, range(index % blocks, index % blocks + 1)
    squeezed = node.target in ("squeeze", torch.squeeze) and node.args[1:] == (0,)
    return (recurrent, range(1)) if squeezed and blocks == 1 else None


def bundle_of(network: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The recurrent layer whose last states a node holds, all together."""
    source: Any
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source, index = node.args
    if is_recurrent(network, source):
        return source if index == 1 else None
    recurrent = bundle_of(network, source)
    return None if recurrent is None or _is_tensor(network, source) else recurrent


def _is_tensor(network: fx.GraphModule, bundle: fx.Node) -> bool:
    """Whether last states are one tensor, not an LSTM's pair of two."""
    return not isinstance(layer_of(network, bundle.all_input_nodes[0]), nn.LSTM)
