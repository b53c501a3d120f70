"""Samples that several processes draw: the same ones, however many processes there are."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeromean.arguments import require_integer
from zeromean.prediction.processes import become_child, prepared_for_children, start_context
from zeromean.prediction.sources import Source, networks_of

# Samples that are drawn with one seed. It decides the numbers, so that it does not depend on how
# many processes there are; the usual 20 samples are shared evenly by two and by four of them.
PART = 5

# Draws so many samples of a network, with a seed.
Draw = Callable[[nn.Module, Any, int, int, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Work:
    """What a process has to know to draw any part."""

    source: Source
    inputs: Any
    draw: Draw
    options: dict[str, Any]


def parts_of(
    work: Work, num_samples: int, seed: int | None, devices: int
) -> Iterator[tuple[nn.Module, Iterator[Tensor]]]:
    """The networks of a source, each with its samples, part by part and in their order."""
    devices = require_integer("devices", devices, at_least=1)
    if isinstance(work.source, Iterator):
        raise TypeError(
            "devices= needs networks that every process can go through: a list, or zm.States; got "
            "a generator."
        )
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    sizes = [min(PART, num_samples - start) for start in range(0, num_samples, PART)]
    count = sum(1 for _ in networks_of(work.source)) if devices > 1 else 0
    with ExitStack() as stack:
        results: dict[tuple[int, int], Any] = {}
        if devices > 1:
            pool = stack.enter_context(_pool(work, min(devices, count * len(sizes))))
            stack.callback(pool.shutdown, cancel_futures=True)
            with prepared_for_children(1 if _forks() else _threads(devices)):
                # Processes start when they are first needed, and find what is set here.
                for index in range(count):
                    for part, size in enumerate(sizes):
                        key = index, part
                        results[key] = pool.submit(_part, index, size, _seed(seed, index, part))
        for index, network in enumerate(networks_of(work.source)):

            def samples(index: int = index, network: nn.Module = network) -> Iterator[Tensor]:
                for part, size in enumerate(sizes):
                    if devices > 1:
                        yield _result(results.pop((index, part)))
                    else:
                        part_seed = _seed(seed, index, part)
                        yield work.draw(network, work.inputs, size, part_seed, work.options)

            yield network, samples()


def _seed(*numbers: int) -> int:
    entropy = [number % 2**64 for number in numbers]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def _threads(devices: int) -> int:
    return max(1, torch.get_num_threads() // devices)


def _forks() -> bool:
    return start_context().get_start_method() == "fork"


def _pool(work: Work, devices: int) -> ProcessPoolExecutor:
    context: Any = start_context()
    forks = context.get_start_method() == "fork"
    # A fork has everything as it is. What others are sent is pickled without torch's shared
    # memory, into which it would move the model of this process.
    content: Any = work if forks else _pickled(work)
    return ProcessPoolExecutor(
        devices, context, _begin, (content, 1 if forks else _threads(devices))
    )


def _pickled(work: Work) -> bytes:
    try:
        return pickle.dumps(work)
    except Exception as error:  # pickle raises many kinds.
        raise TypeError(
            f"The model or the inputs cannot be sent to other processes ({error}); define classes "
            "and functions at the top of a module, or leave devices= out."
        ) from error


def _result(future: Any) -> Tensor:
    try:
        return pickle.loads(future.result())
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "A process of this prediction was ended from outside, for want of memory perhaps, or "
            "could not start: in a script, the call must stand under `if __name__ == '__main__':`."
        ) from error


class _Networks:
    """The networks of a source by number, each gone through once where they are asked in order."""

    def __init__(self, work: Work):
        self.work = work
        self.rest = enumerate(networks_of(work.source))
        self.current: tuple[int, nn.Module] = next(self.rest)

    def __getitem__(self, index: int) -> nn.Module:
        while self.current[0] != index:
            self.current = next(self.rest)
        return self.current[1]


# Of a process that helps: set when it begins.
_HELPED: list[_Networks] = []


def _begin(content: Any, num_threads: int) -> None:
    become_child(num_threads)
    work = pickle.loads(content) if isinstance(content, bytes) else content
    _HELPED[:] = [_Networks(work)]


def _part(index: int, size: int, seed: int) -> bytes:
    networks = _HELPED[0]
    work = networks.work
    samples = work.draw(networks[index], work.inputs, size, seed, work.options)
    return pickle.dumps(samples.cpu())
