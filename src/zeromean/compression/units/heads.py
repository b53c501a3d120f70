"""Heads of attention that a forward function makes itself, around scaled_dot_product_attention.

Between the linear layers and the product, such functions only move features about: view, transpose,
chunk. Where each feature goes is seen by sending its number the same way. Heads do not mix in the
product, so that one of them is the features of its place along dimension 1, all the way.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from zeromean.compression.graph.network import Network
from zeromean.compression.graph.roles import Role
from zeromean.prediction.inputs import Inputs, as_arguments


@dataclass(frozen=True)
class TracedHeads:
    """Heads of one attention.

    Attributes:
        number: How many heads there are.
        makers: For each linear layer that makes queries, keys or values, the heads that its outputs
            belong to.
        reader: The linear layer that reads what comes out.
        read: The heads that its inputs belong to.
        moved: For each node in between, the heads of its features, in the shape of the example.
        length: Positions of the example's sequences.
    """

    number: int
    makers: dict[fx.Node, Tensor]
    reader: fx.Node
    read: Tensor
    moved: dict[fx.Node, Any]
    length: int


def traced_heads(network: Network, example_inputs: Inputs | None) -> list[TracedHeads]:
    """All attention of this kind that the graph shows."""
    products = [n for n in network.nodes if n.target is F.scaled_dot_product_attention]
    if not products or example_inputs is None:
        return []
    values = _values(network, example_inputs)
    found = (_heads_of(network, node, values) for node in products)
    return [heads for heads in found if heads is not None]


def _heads_of(
    network: Network, product: fx.Node, values: Mapping[fx.Node, Any]
) -> TracedHeads | None:
    if len(product.args) < 3 or not _is_simple(product, values):
        return None
    output = values[product]
    if output.dim() != 4 or output.shape[1] < 2:
        return None
    heads = torch.arange(output.shape[1]).view(1, -1, 1, 1)
    makers: dict[fx.Node, Tensor] = {}
    moved: dict[fx.Node, Any] = {}
    ends: Any = product.args[:3]
    chains = [_chain_before(network, end) for end in ends]
    behind = _chain_behind(network, product)
    if behind is None or any(chain is None for chain in chains):
        return None
    inside = {product, *(n for chain in chains for n in chain or ())}
    for end, chain in zip(ends, chains, strict=True):
        assert chain is not None
        maker = chain[0]
        if any(user not in inside for node in chain for user in node.users):
            return None
        numbers = torch.arange(values[maker].shape[-1]).expand(values[maker].shape)
        sent = _sent(chain, numbers, values)
        place = sent[end]
        if place.dim() != 4 or place.shape[1] != output.shape[1]:
            return None
        of_unit = makers.setdefault(maker, torch.full((values[maker].shape[-1],), -1))
        for head in range(place.shape[1]):
            units = place[:, head].unique()
            if (of_unit[units] >= 0).any() or len(units) != place.shape[-1]:
                return None
            of_unit[units] = head
    for of_unit in makers.values():
        if (of_unit < 0).any():
            return None
    for chain in chains:
        assert chain is not None
        maker = chain[0]
        moved |= _sent(chain, makers[maker].expand(values[maker].shape), values)
    moved = {node: value for node, value in moved.items() if node not in makers}
    *between, reader = behind
    sent = _sent([product, *between], heads.expand(output.shape), values)
    read = sent[between[-1] if between else product]
    if (read != read.flatten(0, -2)[0]).any():
        return None
    moved |= {node: value for node, value in sent.items() if node is not product}
    return TracedHeads(
        output.shape[1], makers, reader, read.flatten(0, -2)[0], moved, output.shape[2]
    )


def _is_simple(product: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether all heads are alike: a mask does not tell them apart, keys are not shared."""
    mask = product.args[3] if len(product.args) > 3 else product.kwargs.get("attn_mask")
    mask = values.get(mask) if isinstance(mask, fx.Node) else mask
    alike = not isinstance(mask, Tensor) or mask.dim() < 3 or mask.shape[-3] == 1
    return alike and not product.kwargs.get("enable_gqa", False)


def _chain_before(network: Network, end: Any) -> list[fx.Node] | None:
    """From a linear layer to what it becomes, through what only moves features."""
    chain: list[fx.Node] = []
    while isinstance(end, fx.Node):
        chain.insert(0, end)
        if _is_linear(network, end):
            return chain
        if not _moves(end):
            return None
        end = end.args[0]
    return None


def _chain_behind(network: Network, node: fx.Node) -> list[fx.Node] | None:
    """From what a node returns to the linear layer that reads it, which comes last."""
    chain: list[fx.Node] = []
    while len(node.users) == 1:
        (node,) = node.users
        chain.append(node)
        if _is_linear(network, node):
            return chain
        if not _moves(node) or node.args[0] is not (chain[-2] if len(chain) > 1 else node.args[0]):
            return None
    return None


def _is_linear(network: Network, node: fx.Node) -> bool:
    known = network[node]
    return type(known.layer) is nn.Linear and known.role is Role.AFFINE


def _moves(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", node.target)
    if node.op not in ("call_method", "call_function") or name not in MOVES:
        return False
    if name != "getitem":
        return True
    index = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return all(type(p) is int or p is Ellipsis or p == slice(None) for p in parts)


def _sent(chain: list[fx.Node], start: Tensor, values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """What becomes of a tensor on its way through the nodes of a chain, behind the first."""
    sent: dict[fx.Node, Any] = {chain[0]: start}
    for node in chain[1:]:
        others, options = map_arg(
            (node.args[1:], node.kwargs), lambda n: values[n]
        )  # Sizes that the forward function asks for.
        call: Any = node.target
        call = getattr(Tensor, call) if node.op == "call_method" else call
        sent[node] = call(sent[node.args[0]], *others, **options)  # pyright: ignore
    return sent


def _values(network: Network, example_inputs: Inputs) -> dict[fx.Node, Any]:
    """What every node returns for the example."""
    args, kwargs = as_arguments(example_inputs)
    recorder = _Recorder(network.module)
    with torch.no_grad():
        recorder.run_with(args, kwargs)
    return recorder.values


class _Recorder(fx.Interpreter):
    values: dict[fx.Node, Any]

    def run_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = {}
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        self.keywords = bound.kwargs
        self.run(*bound.args)

    def placeholder(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target.startswith("**"):
            return self.keywords
        return super().placeholder(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


# Functions and methods that only move features about.
MOVES = {
    *("view", "reshape", "unflatten", "flatten", "transpose", "swapaxes", "permute", "movedim"),
    *("chunk", "split", "unbind", "contiguous", "clone", "getitem"),
}
