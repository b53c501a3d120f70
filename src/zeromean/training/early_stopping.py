"""The best epoch of a run, and when to stop: what its metrics say, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeromean.training.config import TrainingConfig


def best_epoch(history: Sequence[Mapping[str, Any]], config: TrainingConfig) -> int | None:
    """The epoch whose weights count, counted from 1; None where nothing is monitored.

    A number that is not finite, which JSON has as null, is worse than any other.
    """
    if config.monitor is None:
        return None
    best: tuple[float, int] | None = None
    for row in history:
        value = _value(row, config.monitor)
        if value is None:
            continue
        # The first of equals, as everybody does it.
        goodness = value if config.monitor_mode == "max" else -value
        if best is None or goodness > best[0]:
            best = goodness, row["epoch"]
    return None if best is None else best[1]


def is_over(history: Sequence[Mapping[str, Any]], config: TrainingConfig) -> bool:
    """Whether the run has done its epochs, or has waited long enough for a better one."""
    if not history:
        return False
    if history[-1]["epoch"] >= config.epochs:
        return True
    if config.patience is None:
        return False
    return history[-1]["epoch"] - (best_epoch(history, config) or 0) >= config.patience


def _value(row: Mapping[str, Any], monitor: str) -> float | None:
    if monitor not in row:
        numbers = [name for name, value in row.items() if isinstance(value, float)]
        raise ValueError(
            f"monitor={monitor!r} is not among the metrics, {', '.join(numbers)}; pass "
            "validation=, or let on_epoch return it."
        )
    value = row[monitor]
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(f"monitor={monitor!r} must be a number, got {value!r}.")
    return value
