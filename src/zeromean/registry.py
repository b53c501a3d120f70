"""Parts that files and error messages know by name.

A noise, sampler, prior, posterior or layer registers itself where it is defined. Whatever has to
find it again by its name asks here: `zm.save` and `zm.load`, compressed files, conversion. A file
names parts and never imports them, so that it cannot run what nobody has imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

Kind = Literal["noise", "sampler", "prior", "posterior", "layer"]
Part = TypeVar("Part", bound=Callable[..., Any])


class UnregisteredError(KeyError):
    """A name that stands for nothing, as far as has been imported."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it.


class Registry(Mapping[str, Any]):
    """Parts of one kind by name, in the order in which they were registered."""

    def __init__(self, kind: Kind):
        self.kind = kind
        self._parts: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._parts:
            raise UnregisteredError(
                f"no {self.kind} is registered as {name!r}; import the module that defines it with "
                f"@zm.register({self.kind!r}) first"
            )
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def add(self, name: str, part: Any) -> None:
        other = self._parts.get(name, part)
        # A notebook may run a cell again, which defines the same thing anew.
        if _home(other) != _home(part):
            raise ValueError(
                f"There is a {self.kind} registered as {name!r} already, {other!r}; give this one "
                f"a name of its own: @zm.register({self.kind!r}, name=…)."
            )
        self._parts[name] = part

    @property
    def shipped(self) -> list[str]:
        """The names that `zm.` has too: of the parts that come with this package."""
        return sorted(n for n, p in self._parts.items() if p.__module__.startswith("zeromean."))

    def name_of(self, part: Any) -> str | None:
        """The name of a part; None where it is not registered."""
        return next((name for name, known in self._parts.items() if known is part), None)


NOISES = Registry("noise")
SAMPLERS = Registry("sampler")
"""Samplers by name, those of your own that are registered included."""
PRIORS = Registry("prior")
POSTERIORS = Registry("posterior")
LAYERS = Registry("layer")
REGISTRIES = {r.kind: r for r in (NOISES, SAMPLERS, PRIORS, POSTERIORS, LAYERS)}


def register(kind: Kind, *, name: str | None = None) -> Callable[[Part], Part]:
    """Let files know a part of your own by name, so that `zm.save` and `zm.load` take it.

    Put it above the definition: `@zm.register("noise")`. A file that names it can be read wherever
    the module with the definition has been imported.

    Args:
        kind: "noise", "sampler", "prior", "posterior" or "layer".
        name: What files call it. Default: the name of the function or class.
    """
    if kind not in REGISTRIES:
        raise ValueError(f"kind must be one of {', '.join(map(repr, REGISTRIES))}, got {kind!r}.")

    def decorate(part: Part) -> Part:
        own = name or getattr(part, "__name__", None)
        if not callable(part) or not isinstance(own, str):
            raise TypeError(f"A {kind} must be a function or class with a name, got {part!r}.")
        REGISTRIES[kind].add(own, part)
        return part

    return decorate


def _home(part: Any) -> tuple[Any, Any]:
    return getattr(part, "__module__", None), getattr(part, "__qualname__", part)
