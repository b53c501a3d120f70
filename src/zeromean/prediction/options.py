"""What every prediction takes, for the types of those that return one thing or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from torch import Tensor

from zeromean.arguments import require_integer
from zeromean.prediction.by_moments import Method
from zeromean.samplers.sampler import Sampler


class Options(TypedDict, total=False):
    sampler: Sampler | Literal["auto"] | None
    seed: int | None
    chunk_size: int | None
    batch_size: int | None
    select: Callable[[Any], Tensor] | None
    devices: int | None
    method: Method


def require_several(what: str, num_samples: int) -> None:
    """Refuse one sample where a spread is asked for."""
    require_integer("num_samples", num_samples)
    if num_samples < 2:
        raise ValueError(f"{what} needs num_samples of at least 2, got {num_samples}.")
