"""How processes are started that help this one."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch


def start_context() -> BaseContext:
    """Fresh interpreters where they can find what this one has defined, and else copies of it.

    A fork of a process that has used torch's threads can hang, so that a script or a module gets
    new interpreters ("spawn"), which import it again. What an interactive session has defined
    nobody can import: there it must be a fork, whose processes then have one thread each.
    """
    return multiprocessing.get_context("fork" if _is_interactive() else "spawn")


def _is_interactive() -> bool:
    if sys.platform != "linux" or torch.cuda.is_initialized():
        return False  # Forks of CUDA, and of Apple's frameworks, do not work.
    main = sys.modules["__main__"]
    return getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None


@contextmanager
def prepared_for_children(num_threads: int) -> Iterator[None]:
    """What a child finds before it imports torch: its number of threads, and deaf to Ctrl-C.

    It is the parent that ends its children.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main_thread else None
    try:
        yield
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, handler)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def started_child(
    context: Any, target: Callable[..., None], arguments: Sequence[Any], *, threads: int
) -> tuple[Any, Connection]:
    """A child that calls `target(connection, *arguments)`, and this end of the connection."""
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(there, *arguments))
    with prepared_for_children(threads):
        process.start()
    there.close()  # So that its end shows here.
    return process, here


def pickled(work: Any, what: str, advice: str) -> bytes:
    """What other processes are sent: bytes, for torch's own way moves a model into shared memory.

    Args:
        what: What it consists of, for the error where it cannot be sent.
        advice: What to do then.
    """
    try:
        return pickle.dumps(work)
    except Exception as error:  # pickle raises many kinds.
        raise TypeError(f"{what} cannot be sent to other processes ({error}); {advice}.") from error


def become_child(num_threads: int) -> None:
    """At the start of a child: its threads, and that it ends with its parent."""
    torch.set_num_threads(num_threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its children, so they watch it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
