"""Where the networks of a prediction come from.

A source is a module, whose noise makes many networks of it, or an iterable of modules that count
alike: a list is an ensemble, `States` gives one architecture the weights of many stored states.
Whatever predicts takes a source, so that a new kind of one (a chain of Langevin dynamics, draws
from a Laplace approximation, snapshots on disk) is a class or a generator that yields modules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from zeromean.arguments import require_model, shown

Source = nn.Module | Iterable[nn.Module]
"""What predictions take: one network, or several that count alike."""


class States:
    """One architecture with many stored weights: samples of a chain, snapshots, Laplace draws.

    Args:
        model: The architecture; it is left as it is. What a state does not hold (BatchNorm's
            statistics, or all but the last layer) is the model's.
        states: State dicts, or parts of them, by the names of `model.state_dict()`.
    """

    def __init__(self, model: nn.Module, states: Sequence[Mapping[str, Tensor]]):
        require_model(model)
        if isinstance(states, Mapping) or not isinstance(states, Sequence) or not states:
            raise TypeError(
                f"states must be a list of at least one state dict, got {shown(states)}; pass "
                "[state_dict] for a single one."
            )
        known = model.state_dict()
        for index, state in enumerate(states):
            _require_state(f"states[{index}]", state, known)
        self.model = model
        self.states = states

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[nn.Module]:
        """The networks one after the other, each valid until the next is asked for."""
        network = copy.deepcopy(self.model)
        for state in self.states:
            network.load_state_dict({**self.model.state_dict(), **state})
            yield network

    def __repr__(self) -> str:
        return f"States({type(self.model).__name__}, {len(self)} states)"


def networks_of(source: Source) -> Iterator[nn.Module]:
    """The networks of a source, each checked when its turn comes."""
    networks = [source] if is_one(source) else source
    if isinstance(networks, (str, bytes, Mapping, Tensor)) or not isinstance(networks, Iterable):
        require_model(source)  # It says what came instead.
    count = 0
    for network in cast(Iterable[nn.Module], networks):
        require_model(network, f"network {count}")
        count += 1
        yield network
    if count == 0:
        raise ValueError("A prediction needs at least one network, got none.")


def is_one(source: Source) -> bool:
    """Whether a source is one module, and its noise the only thing that varies."""
    return isinstance(source, nn.Module) and not isinstance(source, nn.ModuleList)


def _require_state(name: str, state: Any, known: Mapping[str, Tensor]) -> None:
    if not isinstance(state, Mapping) or not state:
        raise TypeError(f"{name} must be a state dict with at least one entry, got {shown(state)}.")
    for key, value in state.items():
        if key not in known:
            raise ValueError(
                f"{name} has {key!r}, which the model has not; its names are those of "
                "model.state_dict()."
            )
        if not isinstance(value, Tensor) or value.shape != known[key].shape:
            raise ValueError(
                f"{name} must have a tensor of shape {tuple(known[key].shape)} for {key!r}, got "
                f"{shown(value)}."
            )
