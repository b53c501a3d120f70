"""What a sampler says of itself, so that nobody has to know it by its name.

`partial(zm.weight)` and a wrapped `zm.weight` draw as `zm.weight` does, and a sampler of one's own
may say that it does so too: predictions, held noise, recurrent layers and certificates ask it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Draws(Enum):
    """What a sampler draws.

    Attributes:
        OUTPUTS: Every output by itself, normal noise with its mean and variance.
        WEIGHTS: One weight for the whole batch.
        FLIPPED_WEIGHTS: One weight, whose signs differ by example.
        NOTHING: The means alone.
        CHEAPER: Weights or outputs, whichever is cheaper and the same to every example.
        UNKNOWN: Something that only the sampler knows.
    """

    OUTPUTS = "outputs"
    WEIGHTS = "weights"
    FLIPPED_WEIGHTS = "flipped weights"
    NOTHING = "nothing"
    CHEAPER = "cheaper"
    UNKNOWN = "unknown"


def draws(what: Draws, *, needs_normal_noise: bool = False) -> Callable[[Function], Function]:
    """Let a sampler say what it draws, and whether that holds for normal noise alone."""

    def decorate(sampler: Function) -> Function:
        setattr(sampler, "draws", what)  # noqa: B010, as functions have no such attribute
        setattr(sampler, "needs_normal_noise", needs_normal_noise)  # noqa: B010
        return sampler

    return decorate


def drawn_by(sampler: Any) -> Draws:
    """What a sampler draws; one that does not say is unknown."""
    return getattr(_innermost(sampler), "draws", Draws.UNKNOWN)


def needs_normal_noise(sampler: Any) -> bool:
    return getattr(_innermost(sampler), "needs_normal_noise", False)


def _innermost(sampler: Any) -> Any:
    """The function in a partial; `functools.wraps` copies what a function says by itself."""
    while isinstance(sampler, partial):
        sampler = sampler.func
    return sampler
