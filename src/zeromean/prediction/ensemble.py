"""Networks of one architecture that predict together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from zeromean.arguments import require_model, shown


class Ensemble(nn.ModuleList):
    """Networks of one architecture that count alike: `zm.predict_proba(ensemble, x)` and the like.

    Predictions draw `num_samples` from each member, deterministic or random. As a module it moves
    between devices, has parameters and a state dict; members are `ensemble[0]`, `ensemble[1]`, ….
    Networks of several architectures predict together as a plain list.

    Args:
        members: At least one module, none of them twice. They are not copied.
    """

    def __init__(self, members: Iterable[nn.Module]):
        # nn.Sequential is iterable too, and yet one network.
        one = isinstance(members, nn.Module) and not isinstance(members, nn.ModuleList)
        unfit = isinstance(members, (str, bytes, Tensor)) or not isinstance(members, Iterable)
        if one or unfit:
            hint = "; put it in a list" if one else ""
            raise TypeError(f"members must be a list of modules, got {shown(members)}{hint}.")
        members = list(members)
        if not members:
            raise ValueError("An ensemble needs at least one member, got none.")
        first = shapes_of(members[0], 0)
        for index, member in enumerate(members):
            require_same_shapes(shapes_of(member, index), first, f"member {index}", "member 0")
        if len({id(member) for member in members}) < len(members):
            raise ValueError(
                "The same module is a member twice, so that both would always agree; train them "
                "by themselves, or copy.deepcopy a module that is trained further."
            )
        super().__init__(members)


def shapes_of(member: Any, index: int) -> dict[str, tuple[int, ...]]:
    """The shapes of everything in a state dict."""
    require_model(member, f"member {index}")
    state = member.state_dict()
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def require_same_shapes(
    found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], name: str, other: str
) -> None:
    """Refuse a member of another architecture, by the first tensor that tells."""
    for key in {**wanted, **found}:
        if found.get(key) != wanted.get(key):
            here, there = (_described(shapes.get(key)) for shapes in (found, wanted))
            raise ValueError(
                f"Members of an ensemble have one architecture, but {key} {here} in {name} and "
                f"{there} in {other}; networks that differ predict together as a plain list."
            )


def _described(shape: tuple[int, ...] | None) -> str:
    return "is missing" if shape is None else f"has the shape {shape}"
