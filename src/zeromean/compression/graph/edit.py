"""A network as a graph of modules: looking at its nodes and changing them."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import Any

from torch import fx, nn


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward function."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def layer_of(network: fx.GraphModule, node: fx.Node) -> Any:
    """The module that a node calls, or None."""
    return network.get_submodule(str(node.target)) if node.op == "call_module" else None


def obstacle(network: fx.GraphModule, node: fx.Node) -> str | None:
    """Why the module of a node must stay as it is, whatever it does."""
    layer = layer_of(network, node)
    if has_hooks(layer):
        return "it has hooks"
    if node.meta.get("called_again") and any(True for _ in layer.parameters()):
        # Its inputs may differ in what is constant, and in who reads its output.
        return "it is called more than once"
    if node.kwargs or len(node.args) != 1 or len(node.all_input_nodes) != 1:
        return "it is called with more than one argument"
    return None


def lone_source(node: fx.Node) -> fx.Node | None:
    """The node that a node reads, if nothing else reads it."""
    source = node.all_input_nodes[0]
    return source if len(source.users) == 1 else None


def replace_node_(network: fx.GraphModule, node: fx.Node, module: nn.Module | None) -> fx.Node:
    """Let a node call another module on its input, or (None) pass its input on."""
    if module is None:
        new = node.all_input_nodes[0]
    else:
        new = insert_(network, node, module)
        new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    network.graph.erase_node(node)
    return new


def insert_(
    network: fx.GraphModule, before: fx.Node, module: nn.Module, suffix: str = ""
) -> fx.Node:
    """Let a new node in front of another one call a module on the same input."""
    target = _add_module_(network, before, module, suffix)
    with network.graph.inserting_before(before):
        return network.graph.call_module(target, (before.all_input_nodes[0],))


def insert_behind_(
    network: fx.GraphModule, node: fx.Node, module: nn.Module, suffix: str
) -> fx.Node:
    """Let a new node call a module on the output of a node, for all that read it."""
    target = _add_module_(network, node, module, suffix)
    inputs = [n for n in network.graph.nodes if n.op == "placeholder"]
    with network.graph.inserting_after(inputs[-1] if node in inputs else node):
        new = network.graph.call_module(target, (node,))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


def name_nodes_(network: fx.GraphModule, layers: Mapping[str, str]) -> None:
    """Note for every node which layer it calls, and what the module is called in the end.

    Args:
        layers: What layers are called that have another name here than in the model.
    """
    names: dict[str, str] = {}
    for node in network.graph.nodes:
        node.meta["name"] = node.name
        if node.op == "call_module":
            if node.target not in names:
                name = node.target.replace(".", "_").rstrip("_")
                while name in names.values() or not _is_free(network, name):
                    name += "_"
                names[node.target] = name
            layer = layers.get(node.target, node.target)
            node.meta |= {"layer": layer, "name": names[node.target]}


def _is_free(network: fx.GraphModule, name: str) -> bool:
    """Whether a module of a graph can have a name: it becomes an attribute, in code."""
    taken = hasattr(fx.GraphModule, name) or name in vars(network)
    return bool(name) and not keyword.iskeyword(name) and not taken


def _add_module_(network: fx.GraphModule, node: fx.Node, module: nn.Module, suffix: str) -> str:
    name = node.meta.get("name", node.name) + suffix
    taken = {other.meta.get("name") for other in network.graph.nodes}
    while hasattr(network, name) or name in taken:
        name += "_"
    network.add_module(name, module)
    return name
