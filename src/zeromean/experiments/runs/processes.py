"""Runs in processes of one thread each, which end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

# What experiments, data sets and training raise for what the user can mend, in a sentence.
MENDABLE = (ValueError, OSError, ImportError)


def run_in_processes(run_one: Callable[[Any], object], configs: Sequence[Any], jobs: int) -> None:
    """Run every configuration in a process of its own, and raise at the end what has failed.

    Args:
        run_one: What a process does with its configuration; it must be importable there.
        jobs: Processes at a time.

    Raises:
        ValueError: For what the user can mend, in one line for each failure.
        RuntimeError: For other failures, with their tracebacks.
    """
    # A fresh interpreter for each run: forking a process that has used torch's threads can hang.
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(configs))
    # Seeds and processes, by the connections over which they report.
    running: dict[Any, tuple[int, Any]] = {}
    failures: list[tuple[bool, str]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                receiver, sender = context.Pipe(duplex=False)
                config = waiting.pop()
                process = context.Process(
                    target=_child, args=(run_one, config, sender), daemon=True
                )
                with _one_thread(), _deaf_to_interrupts():
                    process.start()
                sender.close()
                running[receiver] = config.seed, process
            ready: list[Any] = wait(list(running))
            for receiver in ready:
                seed, process = running.pop(receiver)
                try:
                    failure = receiver.recv()
                except EOFError:
                    process.join()
                    failure = (
                        True,
                        f"The process of seed {seed} was ended from outside (code "
                        f"{process.exitcode}), for want of memory perhaps; run again to go on, "
                        "with fewer --jobs if need be.",
                    )
                process.join()
                if failure is not None:
                    failures.append(failure)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()
    if failures:
        text = "\n".join(dict.fromkeys(text for _, text in failures))
        raise (ValueError if all(mendable for mendable, _ in failures) else RuntimeError)(text)


def _child(run_one: Callable[[Any], object], config: Any, sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    failure = None
    try:
        run_one(config)
    except MENDABLE as error:
        failure = (True, str(error))
    except Exception:
        failure = (False, traceback.format_exc())
    sender.send(failure)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its children, so they watch it. Nothing is lost."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let a child find OMP_NUM_THREADS=1 before it imports torch."""
    previous = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = previous


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let a child ignore Ctrl-C from its first moment: it is the parent that ends its children."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
