"""The processes that train a model together, and what they do for each other."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

Result = TypeVar("Result")
# What one process does alone (an evaluation, the file of a checkpoint) may take any time.
_PATIENCE = timedelta(days=365)
# What exceptions of one process become in the others.
MENDABLE: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, OSError, FileNotFoundError, PermissionError, ImportError)
}


@dataclass(frozen=True)
class Group:
    """The processes of a training, as one of them sees them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the processes of this machine."""
    local_size: int = 1
    patient: Any = None
    """A process group on CPUs in which one may wait for another as long as it takes."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first(self, function: Callable[[], Result]) -> Result:
        """Let the first process call a function, and give what it returns, or raises, to all."""
        if self.world_size == 1:
            return function()
        outcome: list[Any] = [None, None, None]
        error: Exception | None = None
        if self.is_first:
            try:
                outcome[0] = function()
            except Exception as raised:
                error, outcome[1:] = raised, [type(raised).__name__, str(raised)]
        self.share(outcome)
        if error is not None:
            raise error
        result, kind, text = outcome
        if kind is not None:
            raise MENDABLE.get(kind, RuntimeError)(text)
        return result

    def share(self, values: list[Any]) -> None:
        """Put what the first process has in a list into that of every other."""
        if self.world_size > 1:
            distributed.broadcast_object_list(
                values, src=0, group=self.patient, device=torch.device("cpu")
            )

    def copy_first_(self, tensors: Iterable[Tensor]) -> None:
        """Put the first process's values into these tensors of every other."""
        if self.world_size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all processes."""
        if self.world_size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        distributed.all_reduce(total, group=self.patient)
        return total.tolist()


ALONE = Group()


def launched_elsewhere() -> tuple[int, int] | None:
    """Rank and number of the processes that torchrun, or a script itself, has made; or None."""
    if distributed.is_available() and distributed.is_initialized():
        found = distributed.get_rank(), distributed.get_world_size()
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        return None
    return found if found[1] > 1 else None


@contextmanager
def group_of(
    rank: int, world_size: int, accelerator: str, *, store: Any = None, local: bool = False
) -> Iterator[Group]:
    """Join the other processes: by a store, or as torchrun says where there is none.

    Args:
        local: Whether all processes run on this machine, started for this training alone.
    """
    begun_here = not distributed.is_initialized()
    if begun_here:
        backend = "cpu:gloo,cuda:nccl" if accelerator == "cuda" else "gloo"
        options = {} if store is None else {"store": store, "rank": rank, "world_size": world_size}
        distributed.init_process_group(backend, **options)
    local_rank, local_size = rank, world_size
    if not local:
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    patient: Any = distributed.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        yield Group(rank, world_size, local_rank, local_size, patient)
    finally:
        gc.collect()  # What uses the group goes before it: gloo's threads may abort otherwise.
        if begun_here and local:
            distributed.destroy_process_group()
        else:
            # Other trainings of this process may follow, and need the group of torchrun.
            distributed.destroy_process_group(patient)


def is_about_others(error: BaseException) -> bool:
    """Whether an exception says that another process could not be reached any more."""
    if isinstance(error, distributed.DistError):
        return True
    words = ("gloo", "connection closed by peer", "connection reset", "nccl", "socket")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
