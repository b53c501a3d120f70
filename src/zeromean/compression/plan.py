"""What `zm.compress` has decided about every layer, and why: typed, and put into words here only.

The compressed network carries its plan, through copies and pickles (a copy of torch's graphs that
comes from a pickle forgets it), but not into files, which hold what predicts. What can be seen in
the network itself (sizes, storage, bytes) is not in the plan, so that it stays true when the
network is quantized later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx, nn


class Reason(Enum):
    """Why something is as it is; the value says so."""

    HOOKS = "it has hooks"
    CALLED_AGAIN = "it is called more than once"
    ARGUMENTS = "it is called with more than one argument"
    GROUPS = "a convolution of groups keeps its units"
    NOT_CALLED = "never called"
    NOT_READ = "never read"
    UNCHANGED = "as it was"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Unknown:
    """Nothing is known of what the layer does to units.

    Attributes:
        kind: Its class.
    """

    kind: str

    def __str__(self) -> str:
        return f"{self.kind} stays as it is"


@dataclass(frozen=True)
class Folded:
    """The layer is gone: what it multiplied by is in the weights of another one."""

    into: str

    def __str__(self) -> str:
        return f"in the weights of {self.into}"


@dataclass(frozen=True)
class Reader:
    """Who reads all units of a layer.

    Attributes:
        name: A layer or a function; empty for the output of the network.
        kind: The class of the layer, empty for a function.
    """

    name: str = ""
    kind: str = ""

    def __str__(self) -> str:
        if not self.name:
            return "the output"
        return f"{self.name} ({self.kind})" if self.kind else f"{self.name}()"


@dataclass(frozen=True)
class UnitsLeft:
    """Units one by one.

    Attributes:
        gone: How many units are gone.
        total: How many there were.
        reader: Who reads them all, where none is gone and somebody does.
        uneven: Whether the layers and directions of a recurrent layer need different numbers.
    """

    gone: int
    total: int
    reader: Reader | None = None
    uneven: bool = False

    def __str__(self) -> str:
        words = [f"{self.gone} of {self.total} units gone"] if self.gone else []
        words += [f"all read by {self.reader}"] if self.reader is not None else []
        words += ["the largest of its layers and directions decides"] if self.uneven else []
        return "; ".join(words)


@dataclass(frozen=True)
class HeadsLeft:
    """Heads of attention.

    Attributes:
        gone: How many are gone.
        total: How many there were.
    """

    gone: int
    total: int

    def __str__(self) -> str:
        return f"{self.gone} of {self.total} heads gone"


Decision = Reason | Unknown | Folded | UnitsLeft | HeadsLeft


@dataclass(frozen=True)
class PlannedLayer:
    """One layer of the model.

    Attributes:
        sizes: Its inputs and outputs in the model.
        place: The path of its module in the compressed network, None where it is gone.
        decision: What became of it and why, None where there was nothing to decide.
    """

    sizes: tuple[int, ...]
    place: str | None
    decision: Decision | None = None

    @property
    def note(self) -> str:
        return "" if self.decision is None else str(self.decision)


@dataclass(frozen=True)
class Plan:
    """What was decided about a model.

    Attributes:
        layers: By their names in the model.
        parameters: What became of the parameters outside of layers, by their names.
        untraced: Why torch.fx cannot trace the model, empty where it can.
    """

    layers: Mapping[str, PlannedLayer]
    parameters: Mapping[str, Reason]
    untraced: str = ""

    @property
    def obstacle(self) -> str:
        """Why no units could be removed, empty where nothing was in the way."""
        if not self.untraced:
            return ""
        return f"No units are removed: torch.fx cannot trace the model ({self.untraced})."


def composed(first: Plan, second: Plan) -> Plan:
    """What two compressions one after the other have made of the first model."""
    layers = {
        name: layer if layer.place is None else _composed(layer, second.layers.get(layer.place))
        for name, layer in first.layers.items()
    }
    return Plan(layers, first.parameters, first.untraced or second.untraced)


def _composed(layer: PlannedLayer, later: PlannedLayer | None) -> PlannedLayer:
    if later is None:
        return layer
    decision, ours, theirs = later.decision, layer.decision, later.decision
    if isinstance(ours, UnitsLeft) and isinstance(theirs, UnitsLeft):
        gone = ours.gone + theirs.gone
        reader = None if gone else theirs.reader
        decision = UnitsLeft(gone, ours.total, reader, theirs.uneven)
    if isinstance(ours, HeadsLeft):
        gone = ours.gone + (theirs.gone if isinstance(theirs, HeadsLeft) else 0)
        decision = HeadsLeft(gone, ours.total)
    return PlannedLayer(layer.sizes, later.place, decision or ours)


def leave_plan_(compressed: nn.Module, plan: Plan) -> None:
    """Let a compressed network carry its plan."""
    module: Any = compressed
    setattr(module, _PLAN, plan)
    if isinstance(module, fx.GraphModule):
        # A copy of a graph keeps no other attributes; a pickle keeps them all, but not these.
        module.meta[_KEPT] = {_PLAN: plan}


def plan_of(compressed: nn.Module) -> Plan | None:
    """The plan that a network carries; None for one from a file or from an older version."""
    kept = compressed.meta.get(_KEPT, {}) if isinstance(compressed, fx.GraphModule) else {}
    return vars(compressed).get(_PLAN, kept.get(_PLAN))


_PLAN = "_compression_plan"
_KEPT = "_user_preserved_attributes"  # torch's name
