"""Steps of a prediction that several processes share: the same numbers, however many they are.

Every process goes through all steps in the same order and takes its turns. The first, in which the
prediction was asked for, gets what the others have come to when it is at their steps, so that
memory stays that of a few steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from zeromean.prediction.processes import become_child, pickled, start_context, started_child

# Computes a step where it is this process's turn, and gives what it has come to; None elsewhere.
Turn = Callable[[Callable[[], Any]], Any]
# What exceptions of one process become in the first.
_MENDABLE = {kind.__name__: kind for kind in (ValueError, TypeError)}
_IN_A_MODULE = "define classes and functions at the top of a module, or leave devices= out"


def alone(step: Callable[[], Any]) -> Any:
    """The turns of a process that has no others."""
    return step()


@contextmanager
def shared_turns(function: Callable[[Any, Turn], Any], work: Any, devices: int) -> Iterator[Turn]:
    """Start the other processes, which call `function(work, turn)`, and give this one's turns.

    They end with the block, however it ends.

    Args:
        function: A function at the top of a module, which goes through the same steps.
    """
    context = start_context()
    forks = context.get_start_method() == "fork"
    threads_before = torch.get_num_threads()
    threads = 1 if forks else max(1, threads_before // devices)
    # A fork has everything as it is.
    content: Any = work if forks else pickled(work, "The model or the inputs", _IN_A_MODULE)
    started: list[tuple[Any, Connection]] = []
    try:
        for rank in range(1, devices):
            arguments = rank, devices, function, content, threads
            started.append(started_child(context, _help, arguments, threads=threads))
        torch.set_num_threads(threads)
        yield _Leader([connection for _, connection in started])
    finally:
        torch.set_num_threads(threads_before)
        for process, connection in started:
            connection.close()
            process.kill()
            process.join()


class _Leader:
    def __init__(self, connections: Sequence[Connection]):
        self.connections = connections
        self.steps = 0

    def __call__(self, step: Callable[[], Any]) -> Any:
        rank = self.steps % (1 + len(self.connections))
        self.steps += 1
        if rank == 0:
            return step()
        try:
            kind, value = pickle.loads(self.connections[rank - 1].recv_bytes())
        except (EOFError, OSError) as error:
            raise ChildProcessError(
                "A process of this prediction was ended from outside (the machine may be out of "
                "memory), or could not start: in a script, the call must stand under "
                "`if __name__ == '__main__':`."
            ) from error
        if kind is not None:
            raise _MENDABLE.get(kind, RuntimeError)(value)
        return value


class _Helper:
    def __init__(self, rank: int, devices: int, connection: Connection):
        self.rank = rank
        self.devices = devices
        self.connection = connection
        self.steps = 0

    def __call__(self, step: Callable[[], Any]) -> None:
        mine = self.steps % self.devices == self.rank
        self.steps += 1
        if mine:
            self.connection.send_bytes(pickle.dumps((None, step())))


def _help(
    connection: Connection,
    rank: int,
    devices: int,
    function: Callable[[Any, Turn], Any],
    content: Any,
    threads: int,
) -> None:
    become_child(threads)
    work = pickle.loads(content) if isinstance(content, bytes) else content
    try:
        function(work, _Helper(rank, devices, connection))
    except Exception as error:  # The first process comes to the same, or is told.
        connection.send_bytes(pickle.dumps((type(error).__name__, str(error))))
    # The first process ends this one when it has everything.
    connection.close()
