"""Units inside of layers that are one node for a graph, and the layers that read them.

The hidden units of torch's transformer layers, and the heads of attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeromean.compression.analysis import run_example
from zeromean.compression.graph.network import Network
from zeromean.compression.rewrite.narrow import (
    attention_in_blocks,
    attention_in_graph,
    feed_forward_blocks,
)
from zeromean.compression.units.heads import TracedHeads, traced_heads
from zeromean.prediction.inputs import Inputs, as_arguments


@dataclass(frozen=True)
class NamedGroup:
    """Units by the names of layers.

    Attributes:
        makers: The layers that make them.
        readers: For each layer that reads them, which unit each of its inputs belongs to.
        cost: For each unit, the multiplications for one example that go with it.
        hidden: For recurrent layers among the makers, which unit each hidden unit is.
    """

    makers: tuple[str, ...]
    readers: dict[str, Tensor]
    cost: Tensor
    hidden: dict[str, Tensor] = field(default_factory=dict)


def hidden_groups(
    plain: nn.Module, network: Network, example_inputs: Inputs
) -> Iterator[NamedGroup]:
    """The units inside of the layers of a plain network."""
    blocks = dict(feed_forward_blocks(plain))
    attention = dict([*attention_in_blocks(plain), *attention_in_graph(network)])
    read = _tokens([*blocks.values(), *attention.values()], plain, example_inputs)
    for name, block in blocks.items():
        weights = block.linear1.in_features + block.linear2.out_features
        makers, reader = (f"{name}.linear{i}".removeprefix(".") for i in (1, 2))
        yield _group(makers, reader, block.linear2.in_features, 1, weights * read[block].tokens)
    for name, layer in attention.items():
        inputs, size = layer.out_proj.in_features, layer.out_proj.in_features // layer.num_heads
        weights = 2 * layer.embed_dim + layer.kdim + layer.vdim + 2 * read[layer].length
        cost = size * weights * read[layer].tokens
        yield _group(name, f"{name}.out_proj", inputs, size, cost)
    for heads in traced_heads(network, example_inputs):
        yield _traced(network, heads)


def _traced(network: Network, heads: TracedHeads) -> NamedGroup:
    """Heads that a forward function makes itself."""
    layers: list[Any] = [network.layer(node) for node in (*heads.makers, heads.reader)]
    weights = sum(layer.weight.numel() for layer in layers)
    cost = heads.length * (weights + 2 * heads.length * len(heads.read)) / heads.number
    makers = tuple(network.layer_name(node) for node in heads.makers)
    reader = network.layer_name(heads.reader)
    return NamedGroup(makers, {reader: heads.read}, torch.full((heads.number,), float(cost)))


def _group(maker: str, reader: str, inputs: int, size: int, cost: float) -> NamedGroup:
    index = torch.arange(inputs) // size
    return NamedGroup((maker,), {reader: index}, torch.full((inputs // size,), float(cost)))


@dataclass
class _Read:
    """What a layer was given.

    Attributes:
        tokens: How many, for one example.
        length: Of a sequence.
    """

    tokens: float = 0.0
    length: int = 0


def _tokens(
    layers: Iterable[nn.Module], plain: nn.Module, example_inputs: Inputs
) -> dict[nn.Module, _Read]:
    """What layers are given of an example: all tokens, as layers of one network are compared."""
    args, kwargs = as_arguments(example_inputs)
    examples = max(len(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    found = {layer: _Read() for layer in layers}

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        tokens = given.numel() / given.shape[-1]
        found[layer].tokens += tokens / examples
        found[layer].length = max(found[layer].length, round(tokens / examples))

    with _noted(found, note):
        run_example(plain, example_inputs)
    return found


@contextmanager
def _noted(layers: Iterable[nn.Module], note: Any) -> Iterator[None]:
    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
