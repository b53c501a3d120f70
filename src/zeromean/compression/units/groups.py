"""Units that can only be removed together, and the layers that read them.

A unit of a residual stream is made by several layers, one of a concatenation is read next to
others, a depthwise convolution passes on what it gets. What happens to each unit on its way is
followed by its number; numbers that meet (in a sum, say) are one unit from then on.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from zeromean.compression.graph.network import Network
from zeromean.compression.graph.roles import Role
from zeromean.compression.units.layout import Units
from zeromean.compression.units.reading import reads, taps
from zeromean.compression.units.sources import unbundled
from zeromean.layers.stochastic_layer import StochasticLayer
from zeromean.layers.stochastic_module import StochasticModule


@dataclass
class UnitGroup:
    """Units that the same layers read.

    Attributes:
        readers: For each layer that reads them, which unit each of its inputs belongs to;
            `num_units` for inputs that are units of no group.
        hidden: For each recurrent layer among the makers, which unit each of its hidden units is,
            which it reads itself.
        makers: The layers that make them.
        cost: For each unit, the multiplications for one example that go with it.
    """

    readers: dict[fx.Node, Tensor] = field(default_factory=dict)
    hidden: dict[fx.Node, Tensor] = field(default_factory=dict)
    makers: list[fx.Node] = field(default_factory=list)
    cost: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def num_units(self) -> int:
        return len(self.cost)


@dataclass(frozen=True)
class Grouping:
    """All groups of a network.

    Attributes:
        stuck: For layers whose units cannot be removed, what reads them all.
    """

    groups: list[UnitGroup]
    stuck: dict[fx.Node, fx.Node]


def unit_groups(network: Network, known: dict[fx.Node, Units]) -> Grouping:
    """Follow every unit from the layers that make it to those that read it."""
    followed = _Followed(network, known)
    for node in network.nodes:
        followed.pass_(node)
    return followed.grouping()


class _Numbers:
    """Numbers of which some are the same: a union-find forest."""

    def __init__(self) -> None:
        self.parents: list[int] = []

    def fresh(self, count: int) -> Tensor:
        start = len(self.parents)
        self.parents += range(start, start + count)
        return torch.arange(start, start + count)

    def root(self, number: int) -> int:
        while self.parents[number] != number:
            self.parents[number] = self.parents[self.parents[number]]
            number = self.parents[number]
        return number

    def unite(self, ours: list[int], theirs: list[int]) -> None:
        for one, other in zip(ours, theirs, strict=True):
            self.parents[self.root(one)] = self.root(other)


class _Followed:
    def __init__(self, network: Network, known: dict[fx.Node, Units]):
        self.network, self.known = network, known
        self.numbers = _Numbers()
        self.units: dict[fx.Node, Tensor] = {}
        self.made: dict[fx.Node, Tensor] = {}
        self.read: dict[fx.Node, Tensor] = {}
        self.hidden: dict[fx.Node, Tensor] = {}
        self.costs: list[tuple[Tensor, float]] = []
        self.blockers: dict[int, fx.Node] = {}

    def pass_(self, node: fx.Node) -> None:
        """What a node does to the units that it reads, and the units that it has."""
        role = self.network.role(node)
        if role is Role.BUNDLE:
            return  # Whoever reads that reads the recurrent layer.
        if node not in self.known:
            self._block(node)
        elif role is Role.RECURRENT:
            self._recur(node)
        elif role is Role.STATES:
            self._pick(node)
        elif role is Role.AFFINE:
            self._read(node)
            self._make(node)
        elif role is Role.EMBEDDING:
            self._make(node)
        elif role is Role.DEPTHWISE and self._reads(node):
            source = self._source(node)
            repeats = len(self.known[node]) // len(source)
            self.units[node] = source.repeat_interleave(repeats)
            self._add_cost(self.units[node], node)
        elif role in (Role.DEPTHWISE, Role.GROUPED):
            self._block(node)
            self._make(node)
            self._block_units(self.units[node], node)
        elif any(source not in self.units for source in node.all_input_nodes):
            self._block(node)  # Next to units there is something else.
        elif role is Role.CAT:
            self.units[node] = torch.cat([self.units[s] for s in node.all_input_nodes])
        elif role is Role.COMBINE:
            first, *others = (self.units[source] for source in node.all_input_nodes)
            for other in others:
                self.numbers.unite(other.tolist(), first.tolist())
            self.units[node] = first
        else:
            self._pass_on(node)

    def grouping(self) -> Grouping:
        blocked = {self.numbers.root(number): node for number, node in self.blockers.items()}
        makers, joined = self._roots(self.made), _Numbers()
        joined.fresh(len(self.numbers.parents))
        read, hidden = self._roots(self.read), self._roots(self.hidden)
        for by_node in (hidden, read):  # The units of one node are of one group.
            for roots in by_node.values():
                free = [root for root in roots if root not in blocked]
                for root in free:
                    joined.unite([root], free[:1])
        members: dict[int, list[int]] = defaultdict(list)
        for root in dict.fromkeys(r for rs in (*hidden.values(), *read.values()) for r in rs):
            if root not in blocked:
                members[joined.root(root)].append(root)
        costs = self._costs()
        groups = {
            name: UnitGroup(cost=costs[torch.tensor(roots)]) for name, roots in members.items()
        }
        places = {root: i for roots in members.values() for i, root in enumerate(roots)}
        for by_node, kind in ((read, "readers"), (hidden, "hidden")):
            for node, roots in by_node.items():
                here = next((r for r in roots if r not in blocked), None)
                if here is not None:
                    group = groups[joined.root(here)]
                    of_none = group.num_units
                    index = [of_none if root in blocked else places[root] for root in roots]
                    getattr(group, kind)[node] = torch.tensor(index)
        for node, roots in makers.items():
            for name in dict.fromkeys(joined.root(root) for root in roots if root in places):
                groups[name].makers.append(node)
        stuck = {
            node: next(blocked[root] for root in roots if root in blocked)
            for node, roots in makers.items()
            if any(root in blocked for root in roots)
        }
        return Grouping(list(groups.values()), stuck)

    def _read(self, node: fx.Node) -> None:
        if not self._reads(node) or isinstance(self.network.layer(node), StochasticLayer):
            self._block(node)
            return
        source = self._source(node)
        self.read[node] = source
        layer: Any = self.network.layer(node)
        self._add_cost(source, node, per=taps(layer).shape[1])

    def _recur(self, node: fx.Node) -> None:
        """LSTM and GRU: they read their input, and their own hidden units."""
        layer: Any = self.network.layer(node)
        if self._reads(node) and not isinstance(layer, StochasticModule):
            self.read[node] = self._source(node)
        else:
            self._block(node)
        units = self.numbers.fresh(len(self.known[node]))
        self.units[node] = self.made[node] = self.hidden[node] = units
        shape = self.network[node.all_input_nodes[0]].shape
        steps = 1 if shape is None else shape[1 if layer.batch_first else 0]
        for name, weight in layer.named_parameters():
            if name.startswith("weight"):
                # A unit has rows of every gate, and columns of other units.
                self.costs.append((units, 2 * steps * weight.numel() / len(units)))

    def _pick(self, node: fx.Node) -> None:
        """Some hidden units of a recurrent layer."""
        blocks, source = self.network[node].blocks, unbundled(self.network, node.all_input_nodes[0])
        assert blocks is not None
        size = self.network.layer(source).hidden_size
        self.units[node] = self.units[source][blocks.start * size : blocks.stop * size]

    def _make(self, node: fx.Node) -> None:
        units = self.numbers.fresh(len(self.known[node]))
        self.units[node] = self.made[node] = units
        self._add_cost(units, node)

    def _pass_on(self, node: fx.Node) -> None:
        source, found = self._source(node), self.known[node]
        positions, rest = divmod(len(found), len(source))
        if rest:
            self._block(node)
        elif self.known[node.all_input_nodes[0]].last:
            self.units[node] = source.repeat(positions)
        else:
            self.units[node] = source.repeat_interleave(positions)

    def _reads(self, node: fx.Node) -> bool:
        before = node.all_input_nodes[0]
        return before in self.units and reads(self.network.layer(node), self.known.get(before))

    def _source(self, node: fx.Node) -> Tensor:
        return self.units[node.all_input_nodes[0]]

    def _block(self, node: fx.Node) -> None:
        """A node needs all that it reads, whatever it is."""
        for source in (unbundled(self.network, n) for n in node.all_input_nodes):
            if source in self.units:
                self._block_units(self.units[source], node)

    def _block_units(self, units: Tensor, reader: fx.Node) -> None:
        for number in units.tolist():
            self.blockers.setdefault(number, reader)

    def _add_cost(self, units: Tensor, node: fx.Node, per: int | None = None) -> None:
        """The multiplications of a layer, divided among its units."""
        layer, shape = self.network.layer(node), self.network[node].shape
        if isinstance(layer, nn.Module) and hasattr(layer, "weight") and shape is not None:
            weight: Any = layer.weight
            one_table = isinstance(layer, nn.Embedding)  # Nothing is multiplied.
            positions = 0 if one_table else shape[1:].numel() // len(self.known[node])
            self.costs.append((units, weight.numel() * positions / (per or len(units))))

    def _costs(self) -> Tensor:
        costs = torch.zeros(len(self.numbers.parents))
        for units, cost in self.costs:
            costs.index_add_(0, self._root_of(units), torch.full((len(units),), cost))
        return costs

    def _roots(self, by_node: dict[fx.Node, Tensor]) -> dict[fx.Node, list[int]]:
        return {node: self._root_of(units).tolist() for node, units in by_node.items()}

    def _root_of(self, units: Tensor) -> Tensor:
        return torch.tensor([self.numbers.root(number) for number in units.tolist()])
