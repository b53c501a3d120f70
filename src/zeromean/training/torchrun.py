"""Processes of torchrun of which the first does all the work, and the others help it to train."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from zeromean.training.distributed import Group, group_of, launched_elsewhere

# The group of the first process while others serve it.
_SERVED: list[Group] = []


@contextmanager
def led_by_the_first() -> Iterator[bool]:
    """Let the first process do what is in the block, and the others help in each `fit` of it.

    Gives whether this is the first, or the only one; the others come here when all is over.
    """
    if "WORLD_SIZE" not in os.environ or (elsewhere := launched_elsewhere()) is None:
        yield True
        return
    from zeromean.training.trainer import help_to_train

    rank, world_size = elsewhere
    with group_of(rank, world_size, "cpu") as group:
        if rank > 0:
            _serve(group, help_to_train)
            yield False
            return
        _SERVED.append(group)
        try:
            yield True
        finally:
            _SERVED.remove(group)
            with suppress(RuntimeError):  # They may have ended before.
                group.share([None])


def served_group() -> Group | None:
    """The group in which others wait for a job, where this is the first process of it."""
    return _SERVED[-1] if _SERVED else None


def _serve(group: Group, work: Callable[[Any, Group], None]) -> None:
    while True:
        content: list[Any] = [None]
        group.share(content)
        if content[0] is None:
            return
        work(pickle.loads(content[0]), group)
