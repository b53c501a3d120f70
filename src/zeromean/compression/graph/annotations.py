"""What is known of the nodes of a network: which layer each calls, and what it does to units."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from zeromean.compression.graph.operations import (
    Operation,
    operation_called,
    operation_of,
    role_of,
)
from zeromean.compression.graph.roles import Role
from zeromean.compression.plan import Reason


@dataclass
class Annotation:
    """What is known of one node; `Network` keeps it true.

    Attributes:
        name: What its module is called in the compressed network.
        layer: The module that it calls, None for all other nodes.
        places: The layers of the model that it calls by their names, and where in its module each
            is; empty for the module itself.
        called_again: Whether the module is called at other places too.
        shape: That of its output, for the example.
        operation: What it computes, if that is known.
        role: What it does to the units that it reads, as far as removing some is concerned.
        obstacle: Why its module must stay as it is, whatever it does.
        blocks: Of what picks states of a recurrent layer, which ones.
    """

    name: str
    layer: Any = None
    places: dict[str, str] = field(default_factory=dict)
    called_again: bool = False
    shape: torch.Size | None = None
    operation: Operation | None = None
    role: Role = Role.OTHER
    obstacle: Reason | None = None
    blocks: range | None = None


def annotate_(node: fx.Node, known: Mapping[fx.Node, Annotation]) -> bool:
    """Find what a node does, from what is known of those that it reads; returns whether it is new.

    The units of a recurrent layer are those of all its layers and directions: a block for each, in
    the order of torch's last states. `output, last = layer(input)` is taken apart by subscripts.
    """
    here, blocks = known[node], None
    if here.layer is not None:
        here.operation, here.obstacle = operation_of(here.layer), _obstacle(node, here)
        role = role_of(here.layer) if here.obstacle is None else Role.OTHER
    elif node.op in ("call_function", "call_method"):
        here.operation = operation_called(node.target)
        role, blocks = _states_picked(node, known)
        role = _role_of_call(node, here.operation) if role is None else role
    else:
        role = Role.OTHER
    changed = (role, blocks) != (here.role, here.blocks)
    here.role, here.blocks = role, blocks
    return changed


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward function."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def blocks_of(layer: nn.RNNBase) -> int:
    """How many layers and directions there are."""
    return layer.num_layers * (2 if layer.bidirectional else 1)


def _obstacle(node: fx.Node, here: Annotation) -> Reason | None:
    if has_hooks(here.layer):
        return Reason.HOOKS
    if here.called_again and any(True for _ in here.layer.parameters()):
        # Its inputs may differ in what is constant, and in who reads its output.
        return Reason.CALLED_AGAIN
    if node.kwargs or len(node.args) != 1 or len(node.all_input_nodes) != 1:
        return Reason.ARGUMENTS
    return None


def _role_of_call(node: fx.Node, operation: Operation | None) -> Role:
    if operation is None:
        return Role.OTHER
    number = len(node.all_input_nodes)
    if operation.of_list is not Role.OTHER:
        parts = node.args[0] if node.args else ()
        whole = isinstance(parts, (list, tuple)) and len(parts) == number
        return operation.of_list if whole else Role.OTHER
    if number == 1:
        return operation.of_one
    two = number == len(node.args) == 2 and not node.kwargs
    return operation.of_two if two else Role.OTHER


def _states_picked(
    node: fx.Node, known: Mapping[fx.Node, Annotation]
) -> tuple[Role | None, range | None]:
    """What a node picks of a recurrent layer: its output, a last state or all of them together."""
    if not node.all_input_nodes:
        return None, None
    source = node.all_input_nodes[0]
    index = node.args[1] if node.target is operator.getitem else None
    if known[source].role is Role.RECURRENT:
        layer = known[source].layer
        blocks = blocks_of(layer)
        if index == 0:
            return Role.STATES, range(blocks - blocks // layer.num_layers, blocks)
        return (Role.BUNDLE, None) if index == 1 else (None, None)
    if known[source].role is not Role.BUNDLE:
        return None, None
    behind = known[source.all_input_nodes[0]]
    if isinstance(behind.layer, nn.LSTM):  # A pair of bundles.
        return (Role.BUNDLE, None) if node.target is operator.getitem else (None, None)
    while behind.layer is None:
        source = source.all_input_nodes[0]
        behind = known[source.all_input_nodes[0]]
    blocks = blocks_of(behind.layer)
    if isinstance(index, int):
        return Role.STATES, range(index % blocks, index % blocks + 1)
    squeezed = node.target in ("squeeze", torch.squeeze) and node.args[1:] == (0,)
    return (Role.STATES, range(1)) if squeezed and blocks == 1 else (None, None)
