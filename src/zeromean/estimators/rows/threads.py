"""Threads over rows, for products of slices that are too small for BLAS to share out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController

_limits = threading.Lock()


@contextmanager
def one_blas_thread_each() -> Iterator[int]:
    """Limit BLAS to one thread a call; gives the number of threads that may call it at once.

    That is how many it would have used itself, so that limits from outside (a joblib worker's, or
    `threadpoolctl.threadpool_limits`) hold. BLAS has one limit for the whole process: where another
    thread has set it already, there is one to work with, and nothing changes.
    """
    if not _limits.acquire(blocking=False):
        yield 1
        return
    try:
        libraries = _blas()
        number = min((library.num_threads for library in libraries.lib_controllers), default=1)
        with libraries.limit(limits=1):
            yield number
    finally:
        _limits.release()


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
