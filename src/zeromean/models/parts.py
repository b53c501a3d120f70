"""Networks from named parts."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from zeromean.arguments import require_numbers

LayerFactory = Callable[..., nn.Module]


def _sequential(parts: Mapping[str, nn.Module | None]) -> nn.Sequential:
    """The parts in their order, under their names; None stands for a part left out."""
    return nn.Sequential(
        OrderedDict((name, part) for name, part in parts.items() if part is not None)
    )


def scaled(sizes: Iterable[int], width: float) -> list[int]:
    """Numbers of channels in a network of another width, none of which may vanish."""
    require_numbers(width=width)
    if not 0 < width < math.inf:
        raise ValueError(f"width must be positive, got {width}.")
    sizes = list(sizes)
    channels = [round(size * width) for size in sizes]
    if min(channels) < 1:
        raise ValueError(
            f"width={width:g} leaves no channels of a layer with {min(sizes)}; it must be at least "
            f"{(500 // min(sizes) + 1) / 1000:g}."
        )
    return channels


def require_layers(network: str, known: Iterable[str], chosen: Iterable[str], which: str) -> None:
    """Refuse factories of layers that a network does not have."""
    known = list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise TypeError(f"{network} has no layer {unknown[0]!r}; {which}.")
