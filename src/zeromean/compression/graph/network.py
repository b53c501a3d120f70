"""A model as a graph of modules, with what is known of its nodes."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from zeromean.compression.graph.annotations import Annotation, annotate_
from zeromean.compression.graph.roles import Role
from zeromean.compression.plan import Decision


class Network:
    """A graph of modules whose nodes are annotated; all that changes the graph goes through here.

    Args:
        module: The graph, with the modules that it calls.
        layers: What layers are called that have another name here than in the model.

    Attributes:
        decisions: What became of the layers of the model so far, by their names.
    """

    def __init__(self, module: fx.GraphModule, layers: Mapping[str, str]):
        self.module = module
        self.decisions: dict[str, Decision | None] = {}
        self._annotations: dict[fx.Node, Annotation] = {}
        calls = Counter(node.target for node in self.nodes if node.op == "call_module")
        names: dict[str, str] = {}
        for node in self.nodes:
            known = Annotation(node.name)
            if node.op == "call_module":
                target = str(node.target)
                if target not in names:
                    names[target] = _free_name(module, target, names)
                known.name, known.layer = names[target], module.get_submodule(target)
                known.places = {layers.get(target, target): ""}
                known.called_again = calls[target] > 1
            self._annotations[node] = known
            annotate_(node, self._annotations)

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes as they are now, those that are read first."""
        return list(self.module.graph.nodes)

    @property
    def read_by_forward(self) -> list[fx.Node]:
        """The tensors that the forward function reads itself."""
        return [node for node in self.nodes if node.op == "get_attr"]

    def __getitem__(self, node: fx.Node) -> Annotation:
        return self._annotations[node]

    def layer(self, node: fx.Node) -> Any:
        """The module that a node calls, or None."""
        return self._annotations[node].layer

    def role(self, node: fx.Node) -> Role:
        """What a node does to units."""
        return self._annotations[node].role

    def layer_name(self, node: fx.Node) -> str:
        """What the layer that a node calls is called in the model; if it is none, in the end."""
        known = self._annotations[node]
        return next(iter(known.places), known.name)

    def decide_(self, node: fx.Node, decision: Decision | None) -> None:
        """Note what became of the layers that a node calls."""
        self.decisions |= dict.fromkeys(self[node].places, decision)

    def replace_(self, node: fx.Node, module: nn.Module | None) -> fx.Node:
        """Let a node call another module on its input, or (None) pass its input on."""
        if module is None:
            new = node.all_input_nodes[0]
        else:
            new = self.insert_before_(node, module)
            old, known = self[node], self[new]
            known.name, known.places, known.shape = old.name, old.places, old.shape
            known.called_again = old.called_again
        self._take_over_([node], new)
        return new

    def exchange_(self, node: fx.Node, module: nn.Module) -> None:
        """Let a node call another module in the same way, whatever its arguments are."""
        target = self._add_module_(node, module, "_")
        node.target = target
        self[node].layer = module
        self._annotate_readers_(node, itself=True)

    def join_(self, chain: list[fx.Node], module: nn.Module, names: list[str]) -> None:
        """Let one module do what a chain of nodes does, of which each is a part of this name."""
        new = self.insert_before_(chain[0], module)
        self[new].name = self[chain[0]].name
        for node, name in zip(chain, names, strict=True):
            self[new].places |= dict.fromkeys(self[node].places, name)
        self._take_over_(chain, new)

    def insert_before_(self, node: fx.Node, module: nn.Module, suffix: str = "") -> fx.Node:
        """Let a new node in front of another one call a module on the same input."""
        target = self._add_module_(node, module, suffix)
        with self.module.graph.inserting_before(node):
            new = self.module.graph.call_module(target, (node.all_input_nodes[0],))
        return self._annotate_new_(new, module)

    def insert_behind_(self, node: fx.Node, module: nn.Module, suffix: str) -> fx.Node:
        """Let a new node call a module on the output of a node, for all that read it."""
        target = self._add_module_(node, module, suffix)
        inputs = [n for n in self.nodes if n.op == "placeholder"]
        with self.module.graph.inserting_after(inputs[-1] if node in inputs else node):
            new = self.module.graph.call_module(target, (node,))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self._annotate_new_(new, module)
        self._annotate_readers_(new)
        return new

    def select_input_(self, node: fx.Node, module: nn.Module, suffix: str) -> None:
        """Let a node read its input through a module."""
        new = self.insert_before_(node, module, suffix)
        node.replace_input_with(node.all_input_nodes[0], new)
        self._annotate_readers_(new)

    def drop_unread_(self) -> None:
        """Take out what nothing reads."""
        self.module.graph.eliminate_dead_code()
        self._annotations = {node: self._annotations[node] for node in self.nodes}

    def _take_over_(self, chain: list[fx.Node], new: fx.Node) -> None:
        chain[-1].replace_all_uses_with(new)
        for node in reversed(chain):
            self.module.graph.erase_node(node)
            del self._annotations[node]
        self._annotate_readers_(new, itself=True)

    def _annotate_new_(self, new: fx.Node, module: nn.Module) -> fx.Node:
        self._annotations[new] = Annotation(str(new.target), module)
        annotate_(new, self._annotations)
        return new

    def _annotate_readers_(self, node: fx.Node, *, itself: bool = False) -> None:
        if itself:
            annotate_(node, self._annotations)
        for reader in node.users:
            if annotate_(reader, self._annotations):
                self._annotate_readers_(reader)

    def _add_module_(self, node: fx.Node, module: nn.Module, suffix: str) -> str:
        name = self[node].name + suffix
        taken = {known.name for known in self._annotations.values()}
        while hasattr(self.module, name) or name in taken:
            name += "_"
        self.module.add_module(name, module)
        return name


def lone_source(node: fx.Node) -> fx.Node | None:
    """The node that a node reads, if nothing else reads it."""
    source = node.all_input_nodes[0]
    return source if len(source.users) == 1 else None


def _free_name(network: fx.GraphModule, target: str, taken: Mapping[str, str]) -> str:
    """What a module is called as an attribute of a graph, and in its code."""
    name = target.replace(".", "_").rstrip("_")
    while name in taken.values() or not _is_free(network, name):
        name += "_"
    return name


def _is_free(network: fx.GraphModule, name: str) -> bool:
    taken = hasattr(fx.GraphModule, name) or name in vars(network)
    return bool(name) and not keyword.iskeyword(name) and not taken
