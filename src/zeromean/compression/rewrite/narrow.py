"""torch's transformer layers and attention with fewer hidden units and fewer heads.

For a graph each is one node, so that what happens inside of them is done without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.compression.graph.annotations import has_hooks
from zeromean.compression.graph.network import Network
from zeromean.compression.plan import Decision, HeadsLeft, UnitsLeft
from zeromean.compression.rewrite.resize import with_units
from zeromean.layers.plain_attention import PlainAttention, from_torch, has_simple_heads
from zeromean.layers.surgery import replace_modules_

_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def feed_forward_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The transformer layers whose hidden units can go, by their names."""
    for name, module in model.named_modules():
        if isinstance(module, _BLOCKS):
            inside = module.linear1, module.linear2
            if all(type(layer) is nn.Linear for layer in inside):
                yield name, module


def attention_in_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attention of torch's transformer layers whose heads can go: nobody sees its weights."""
    for name, module in model.named_modules():
        if isinstance(module, _BLOCKS):
            for child, attention in module.named_children():
                if has_simple_heads(attention):
                    yield _joined(name, child), attention


def attention_in_graph(network: Network) -> Iterator[tuple[str, Any]]:
    """The attention that a graph calls, whose weights nobody sees either."""
    for node in network.nodes:
        layer = network.layer(node)
        unseen = all(len(user.args) > 1 and user.args[1] == 0 for user in node.users)
        once = not network[node].called_again
        if has_simple_heads(layer) and unseen and once:
            yield network.layer_name(node), layer


def narrow_blocks_(model: nn.Module) -> dict[str, Decision]:
    """Take out hidden units and heads that nobody reads; returns what became of the layers."""
    decisions: dict[str, Decision] = {}
    for name, block in feed_forward_blocks(model):
        if has_hooks(block.linear1) or has_hooks(block.linear2):
            continue
        read = (block.linear2.weight != 0).any(0)
        read[0] |= not read.any()  # So that shapes stay whole.
        if not read.all():
            decisions[_joined(name, "linear1")] = UnitsLeft(int((~read).sum()), len(read))
            everything = read.new_ones(block.linear2.out_features)
            block.linear1 = with_units(block.linear1, read)
            block.linear2 = with_units(block.linear2, everything, read)
    smaller = {}
    for name, attention in attention_in_blocks(model):
        read = heads_read(attention)
        if not (read.all() or has_hooks(attention)):
            smaller[attention] = with_heads(attention, read)
            decisions[name] = HeadsLeft(int((~read).sum()), len(read))
    replace_modules_(model, smaller)
    return decisions


def narrow_attention_(network: Network) -> None:
    """The same for the heads of attention that a graph calls."""
    by_name = {network.layer_name(node): node for node in network.nodes if network[node].places}
    for name, attention in attention_in_graph(network):
        read = heads_read(attention)
        if not (read.all() or has_hooks(attention)):
            network.exchange_(by_name[name], with_heads(attention, read))
            network.decide_(by_name[name], HeadsLeft(int((~read).sum()), len(read)))


def heads_read(attention: Any) -> Tensor:
    """Which heads the output layer reads; one at least, so that shapes stay whole."""
    weight = attention.out_proj.weight.detach()
    read = (weight != 0).unflatten(1, (attention.num_heads, -1)).any(2).any(0)
    read[0] |= not read.any()
    return read


def with_heads(attention: Any, keep: Tensor) -> PlainAttention:
    """Attention with some of its heads."""
    is_torchs = isinstance(attention, nn.MultiheadAttention)
    with torch.no_grad():
        return (from_torch(attention) if is_torchs else attention).with_heads(keep)


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
