"""How things are measured: CPU time in alternating pairs, memory kept for backward, peak memory.

The machine is shared, so wall times and absolute times are noise. What is reported is the ratio
to a floor (the deterministic network) that is measured again right next to every repeat.
"""

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Below this, the timer and the interpreter show in the result; short calls are repeated.
SHORTEST_TIMING = 0.03
LONG_CALL = 0.5
FEWEST_REPEATS = 3
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of per-pair CPU time ratios, and both median times."""

    median: float
    lower: float
    upper: float
    subject_ms: float
    floor_ms: float
    repeats: int


def cpu_ratio(
    subject: Callable[[], Any],
    floor: Callable[[], Any],
    *,
    repeats: int,
    budget: float,
    floor_calls: float = 1,
) -> Ratio:
    """CPU time of `subject` in units of `floor_calls` calls of `floor`.

    Args:
        repeats: number of pairs, at most.
        budget: CPU seconds after which fewer pairs are taken, but never fewer than three.
    """
    subject_number, subject_seconds = _warm_up(subject)
    floor_number, floor_seconds = _warm_up(floor)
    pair_seconds = subject_number * subject_seconds + floor_number * floor_seconds
    repeats = min(repeats, max(FEWEST_REPEATS, int(budget / pair_seconds)))

    subject_times, floor_times = [], []
    for repeat in range(repeats):
        # Who goes first alternates, so that a drift of the machine favours nobody.
        if repeat % 2:
            subject_times.append(_seconds(subject, subject_number))
            floor_times.append(_seconds(floor, floor_number))
        else:
            floor_times.append(_seconds(floor, floor_number))
            subject_times.append(_seconds(subject, subject_number))

    ratios = [s / (f * floor_calls) for s, f in zip(subject_times, floor_times, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(
        median=median,
        lower=lower,
        upper=upper,
        subject_ms=1e3 * statistics.median(subject_times),
        floor_ms=1e3 * statistics.median(floor_times) * floor_calls,
        repeats=repeats,
    )


def mebibytes_kept_for_backward(
    forward: Callable[[], Any], model: nn.Module
) -> tuple[float, float]:
    """What autograd saves during `forward`: everything, and without the model's own parameters.

    Each storage counts once, however many operations save it or a view of it.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        # The graph holds this alias, so the address is not used again before backward. The
        # tensor itself would make a reference cycle where an operation saves its own result.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        result = forward()  # kept, because it holds the graph
    total = sum(storages.values())
    parameters = sum(size for pointer, size in storages.items() if pointer in own)
    del result
    return total / MEBIBYTE, (total - parameters) / MEBIBYTE


def peak_mebibytes(prepare: Callable[..., Callable[[], Any]], *args: Any) -> float:
    """How far `prepare(*args)()` raises the resident memory of a fresh process, at its highest.

    Imports and what `prepare` allocates (the model, the data) do not count.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_rise_of_resident_memory, (prepare, args))


def _rise_of_resident_memory(prepare: Callable[..., Any], args: tuple[Any, ...]) -> float:
    torch.set_num_threads(1)
    work = prepare(*args)
    before = _memory_status("VmRSS")
    work()
    return _memory_status("VmHWM") - before


def _memory_status(field: str) -> float:
    # Not resource.getrusage: on Linux, ru_maxrss of a child starts at what its parent used.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}; peak memory needs Linux.")


def _warm_up(call: Callable[[], Any]) -> tuple[int, float]:
    """How often to call it within one timing, and about how long one call takes."""
    seconds = _seconds(call, 1)
    if seconds < LONG_CALL:  # then the first call may have been slower than the rest
        seconds = max(_seconds(call, 1), 1e-7)
    return max(1, math.ceil(SHORTEST_TIMING / seconds)), seconds


def _seconds(call: Callable[[], Any], number: int) -> float:
    start = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - start) / number
