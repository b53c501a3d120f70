"""Processes that are started for one training, with this one as the first of them."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from zeromean.prediction.processes import become_child, pickled, start_context, started_child
from zeromean.training.distributed import MENDABLE, Group, group_of, is_about_others

# Seconds. A child imports torch and Lightning, on a busy machine perhaps.
_TO_START = 600.0
# What a child needs to say what has happened to it, or to end by itself.
_TO_END = 20.0


@contextmanager
def children(
    work: Callable[[Any, Group], None], job: Any, world_size: int, accelerator: str
) -> Iterator[Group]:
    """Start the other processes, which call `work(job, group)`, and give this one's group.

    They end with the block, however it ends. Where one of them ends too early, the block's own
    exception, which is about a connection that broke, gives way to a sentence about that.

    Args:
        work: A function at the top of a module.
    """
    context: Any = start_context()
    forked = context.get_start_method() == "fork"
    # A child of a fork has the job as it is. To the others it is sent.
    content = None if forked else pickled_job(job)
    threads_before = torch.get_num_threads()
    threads = 1 if forked else max(1, threads_before // world_size)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: dict[int, tuple[Any, Connection]] = {}
    if forked and "torch.distributed.tensor" in sys.modules:
        from zeromean.training.sharding import forget_shards

        forget_shards()
    try:
        for rank in range(1, world_size):
            its_job = job if forked else None
            arguments = rank, world_size, accelerator, store.port, threads, work, its_job
            started[rank] = started_child(context, _run, arguments, threads=threads)
        _wait_until_ready(started)
        torch.set_num_threads(threads)
        with group_of(0, world_size, accelerator, store=store, local=True) as group:
            over = False
            try:
                group.share([content])
                yield group
                over = True
            except RuntimeError as error:
                if is_about_others(error):
                    _explain(started, error)
                raise
            finally:
                # Before the group is left, which waits for exchanges that are under way.
                _end(started, over)
    finally:
        torch.set_num_threads(threads_before)
        _end(started, over=False)


def _end(started: dict[int, tuple[Any, Connection]], over: bool) -> None:
    while started:
        process, connection = started.popitem()[1]
        # None has anything to save, but the last exchange must be over for all.
        if over:
            connection.poll(_TO_END)
        process.kill()
        process.join()
        connection.close()


def _run(
    connection: Connection,
    rank: int,
    world_size: int,
    accelerator: str,
    port: int,
    threads: int,
    work: Callable[[Any, Group], None],
    job: Any,
) -> None:
    """What a child does, from its first moment to its last."""
    become_child(threads)
    try:
        connection.send(("ready",))
        store = TCPStore("127.0.0.1", port, is_master=False)
        with group_of(rank, world_size, accelerator, store=store, local=True) as group:
            content: list[Any] = [None]
            try:
                group.share(content)
                if content[0] is not None:
                    job = pickle.loads(content[0])
                work(job, group)
                connection.send(("done",))
            except Exception as error:
                _report(connection, error)
            # Taking everything down in order takes seconds, and nobody is there to see it; with an
            # exchange that is under way it would not end.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    except Exception as error:
        _report(connection, error)


def _report(connection: Connection, error: Exception) -> None:
    mendable = type(error).__name__ in MENDABLE
    text = str(error) if mendable else traceback.format_exc()
    kind = "peer" if is_about_others(error) else type(error).__name__
    connection.send((kind, text))


def pickled_job(job: Any) -> bytes:
    """A training as other processes get it."""
    return pickled(
        job,
        "The model, the data or the likelihood",
        "define classes and functions at the top of a module, and use no lambda; or start the "
        "script by torchrun, where nothing is sent",
    )


def _wait_until_ready(started: dict[int, tuple[Any, Connection]]) -> None:
    waiting = {connection: rank for rank, (_, connection) in started.items()}
    while waiting:
        ready = wait(list(waiting), timeout=_TO_START)
        if not ready:
            raise ChildProcessError(
                f"{len(waiting)} processes have not started within {_TO_START:.0f} s."
            )
        for connection in ready:
            rank = waiting.pop(connection)  # pyright: ignore
            try:
                connection.recv()  # pyright: ignore
            except EOFError:
                process = started[rank][0]
                process.join()
                raise ChildProcessError(
                    f"Process {rank} has ended while it started (code {process.exitcode}); in a "
                    "script, the call must stand under `if __name__ == '__main__':`, since other "
                    "processes import it."
                ) from None


def _explain(started: dict[int, tuple[Any, Connection]], error: RuntimeError) -> NoReturn:
    """Say which process ended the training: the one that died, or that raised something."""
    said: dict[int, tuple[str, str]] = {}
    dead: dict[int, Any] = {}
    for rank, (process, connection) in started.items():
        try:
            if connection.poll(_TO_END):
                message = connection.recv()
                if len(message) == 2:
                    said[rank] = message
                continue
        except (EOFError, OSError):
            pass
        process.join(_TO_END)
        if process.exitcode:
            dead[rank] = process.exitcode
    for rank, (kind, text) in said.items():
        if kind in MENDABLE:
            raise MENDABLE[kind](text) from error
        if kind != "peer":
            raise RuntimeError(f"Process {rank} has failed:\n{text}") from error
    which = ", ".join(f"{rank} (code {code})" for rank, code in dead.items())
    raise ChildProcessError(
        f"Process {which or '?'} of the training was ended from outside (the machine may be out of "
        "memory); run again to go on after the last complete epoch."
    ) from error
