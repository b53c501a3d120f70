"""Networks from named parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from torch import nn

LayerFactory = Callable[..., nn.Module]


def _sequential(parts: Mapping[str, nn.Module | None]) -> nn.Sequential:
    """The parts in their order, under their names; None stands for a part left out."""
    return nn.Sequential(
        OrderedDict((name, part) for name, part in parts.items() if part is not None)
    )
