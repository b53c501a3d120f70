"""A training as every process of it has to know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zeromean.training.config import TrainingConfig
from zeromean.training.data_sources import DataSource
from zeromean.training.devices import Strategy, require_devices
from zeromean.training.likelihoods import Likelihood

OnBatch = Callable[[Any, Tensor], tuple[Any, Tensor]]
"""What inputs and targets of a batch become before they are trained on."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every process of a training has to know."""

    model: nn.Module
    train: Any
    config: TrainingConfig
    folder: Path
    validation: Any
    test: Any
    likelihood: Likelihood | None
    accelerator: str
    strategy: Strategy
    sync_batchnorm: bool
    num_data: int | None
    steps_per_epoch: int | None
    augment: Any
    on_batch: OnBatch | None = None


def why_inexact(job: Job, source: DataSource, state: dict[str, Any]) -> tuple[str, ...]:
    reasons = [] if source.inexact is None else [source.inexact]
    processes = state.get("processes") or [1]
    if len(processes) > 1:
        reasons.append(f"{' and then '.join(map(str, processes))} processes have trained it")
    elif processes[0] > 1:
        reasons.append("several processes sum their gradients in an order of their own")
    if job.accelerator != "cpu":
        reasons.append(f"kernels of {job.accelerator} may sum in another order each time")
    if job.config.precision == "float16":
        reasons.append("float16 leaves out steps that overflow")
    return tuple(reasons)


def world_size_of(devices: int | None, elsewhere: tuple[int, int] | None, job: Job) -> int:
    """How many processes train, all in all."""
    if elsewhere is not None:
        if devices is not None and devices not in (1, elsewhere[1]):
            raise ValueError(
                f"devices={devices}, but this script has been started as {elsewhere[1]} "
                "processes; leave devices= out."
            )
        world_size = elsewhere[1] if devices is None else devices
    else:
        world_size = require_devices(1 if devices is None else devices, job.accelerator)
    return world_size
