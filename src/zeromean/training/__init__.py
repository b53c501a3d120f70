"""Training on Lightning: the ELBO, logs, checkpoints, and resuming as if never interrupted.

Importing this package does not import Lightning; `fit` and `ElboModule` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeromean.training.collapse import CollapseWarning, CollapseWatch
from zeromean.training.config import TrainingConfig
from zeromean.training.trainer import FitResult, fit, require_lightning

if TYPE_CHECKING:
    from zeromean.training.module import ElboModule

__all__ = [
    "CollapseWarning",
    "CollapseWatch",
    "ElboModule",
    "FitResult",
    "TrainingConfig",
    "fit",
]


def __getattr__(name: str) -> Any:
    if name == "ElboModule":
        require_lightning()
        from zeromean.training.module import ElboModule

        return ElboModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
