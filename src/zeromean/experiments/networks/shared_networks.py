"""Networks that several experiments need, trained once in the folder of models, and their data."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from filelock import AcquireReturnProxy, FileLock, Timeout
from torch import nn

from zeromean.experiments.runs.cpu_time import CpuTime
from zeromean.experiments.runs.identity import digest_of
from zeromean.experiments.runs.json_files import write_json
from zeromean.experiments.runs.log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet
    from zeromean.training import FitResult, TrainingConfig


def train(
    name: str,
    identity: Mapping[str, Any],
    build: Callable[[], nn.Module],
    data: ImageSet,
    config: TrainingConfig,
    log: RunLog,
    *,
    on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None = None,
    augment: Any = None,
    callbacks: Sequence[Any] = (),
) -> FitResult:
    """Train a network, or load it where it has been trained; an interrupted training goes on.

    Args:
        name: What the log calls it.
        identity: Everything but the seed that makes this network another one than the others.
        build: Makes the network, by the seed of `config`.
        on_epoch, augment, callbacks: As in `zeromean.training.fit`.
    """
    from zeromean.training import fit

    folder = log.models / digest_of(identity) / f"seed-{config.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    waiting = f"{name}: another process trains it in {folder}; waiting for that one"
    with _acquired(lock, partial(log.say, waiting)):
        write_json(folder.parent / "network.json", identity)
        log.say(f"{name}: {config.epochs} epochs in {folder}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = build()
        cpu = CpuTime(folder / "cpu_time.json")
        result = fit(
            model,
            data,
            config,
            folder=folder,
            accelerator="cpu",  # As the records were made.
            on_epoch=_timed(on_epoch, cpu),
            augment=augment,
            callbacks=callbacks,
            # Several processes would draw their bars over each other.
            progress=log.progress and multiprocessing.parent_process() is None,
        )
    for reason in result.inexact:
        log.say(f"{name}: not repeatable bit for bit, since {reason}")
    log.note_origin(f"network {folder}", was_there=result.resumed_from > 0)
    log.note_network(f"network {folder}", cpu)
    for row in result.history:
        log.metrics(network=name, **row)
    model.eval()
    return result


def _timed(
    on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None, cpu: CpuTime
) -> Callable[[int, nn.Module], dict[str, Any]]:
    """`on_epoch`, and the CPU time is written down."""

    def timed(epoch: int, model: nn.Module) -> dict[str, Any]:
        row = on_epoch(epoch, model) if on_epoch is not None else {}
        cpu.save()
        return row

    return timed


def _acquired(lock: FileLock, say_that_it_waits: Callable[[], None]) -> AcquireReturnProxy:
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        say_that_it_waits()
        return lock.acquire()


def grey_images(name: str, split: str, size: int, log: RunLog) -> ImageSet:
    """The first images of a split, in 28 × 28 pixels."""
    chosen = _first_images(name, split, size, log)
    if chosen.images.shape[1:] == (1, 28, 28):
        return chosen
    if chosen.images.dim() != 4 or chosen.images.shape[1] != 1:
        raise ValueError(f"these networks read grey images, which {name} has none of.")
    enlarged = F.interpolate(chosen.images, (28, 28), mode="bilinear")
    return dataclasses.replace(chosen, images=enlarged)


def colour_images(name: str, split: str, size: int, log: RunLog) -> ImageSet:
    """The first images of a split, in 32 × 32 pixels of three colours."""
    chosen = _first_images(name, split, size, log)
    if chosen.images.shape[1:] == (3, 32, 32):
        return chosen
    if chosen.images.dim() != 4 or chosen.images.shape[1] not in (1, 3):
        raise ValueError(f"these networks read images, which {name} has none of.")
    enlarged = F.interpolate(chosen.images, (32, 32), mode="bilinear").expand(-1, 3, -1, -1)
    return dataclasses.replace(chosen, images=enlarged.contiguous())


def _first_images(name: str, split: str, size: int, log: RunLog) -> ImageSet:
    from zeromean import data

    loaded = data.load(name, split, data_dir=log.data_dir)
    if size < 1:
        raise ValueError(f"{split}_size must be at least 1, got {size}.")
    return loaded.subset(torch.arange(min(size, len(loaded))))
