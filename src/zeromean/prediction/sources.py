"""Where the networks of a prediction come from.

A source is a module, whose noise makes many networks of it, or an iterable of modules that count
alike: a list is an ensemble, `States` gives one architecture the weights of many stored states.
Whatever predicts takes a source, so that a new kind of one (a chain of Langevin dynamics, draws
from a Laplace approximation, snapshots on disk) is a class or a generator that yields modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from zeromean.arguments import require_function, require_model, shown

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


class Augmented:
    """Networks that see their inputs changed: test-time augmentation as a source of samples.

    Each transform makes one network of it, and all count alike; `lambda x: x` is one of them where
    inputs are to be seen as they are, too. A transform that draws random numbers, by torch, draws
    them for every sample: `[shift] * 8` and `num_samples=1` are eight shifts.

    Args:
        source: A module, or several: what predictions take.
        transforms: Functions of the input tensor. Where outputs have to be turned back, as those of
            a segmentation, pairs of a function of the input and one of the output.
    """

    def __init__(
        self,
        source: Source,
        transforms: Sequence[Callable[[Tensor], Tensor] | tuple[Callable[[Tensor], Tensor], ...]],
    ):
        if isinstance(source, Iterator):
            raise TypeError(
                "Every transform needs the networks again, and a generator gives them once; "
                "collect them in a list, or their state dicts in zm.States."
            )
        one = callable(transforms) or not isinstance(transforms, Sequence)
        if one or isinstance(transforms, str):
            raise TypeError(
                f"transforms must be a list of functions of the input, got {shown(transforms)}."
            )
        if not transforms:
            raise ValueError(
                "transforms must have at least one function; lambda x: x leaves inputs as they are."
            )
        for index, transform in enumerate(transforms):
            pair = transform if isinstance(transform, tuple) else (transform,)
            if len(pair) not in (1, 2):
                raise ValueError(
                    f"transforms[{index}] must be a function of the input, or a pair with a "
                    f"function of the output, got {len(pair)} things."
                )
            for part in pair:
                require_function(f"transforms[{index}]", part, "lambda x: x.flip(-1)")
        self.source = source
        self.transforms = transforms

    def __iter__(self) -> Iterator[nn.Module]:
        """The networks one after the other, each valid until the next is asked for."""
        for network in networks_of(self.source):
            for transform in self.transforms:
                parts = transform if isinstance(transform, tuple) else (transform,)
                first, *last = (_Function(part) for part in parts)
                yield nn.Sequential(first, network, *last)

    def __repr__(self) -> str:
        return f"Augmented({type(self.source).__name__}, {len(self.transforms)} transforms)"


class _Function(nn.Module):
    """A function where a module is wanted."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        changed = self.function(x)
        if not isinstance(changed, Tensor):
            raise TypeError(f"A transform must return a tensor, got {shown(changed)}.")
        return changed


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
