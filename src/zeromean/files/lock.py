"""Folders that one process at a time works in."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(folder: Path, name: str = "lock") -> Iterator[None]:
    """Keep other processes out of a folder; ValueError where one is in it already.

    The lock is that of the operating system: it ends with its process, however that ends.

    Args:
        name: The file that is locked. It stays, since removing it would let two processes in.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder} is being run by another process; wait for it.") from None
    except OSError as error:
        # A finished run must be readable in a folder without write permission.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path, name: str = "lock") -> bool:
    """Whether a process is in a folder; nothing is made there."""
    from filelock import FileLock, Timeout

    if not (folder / name).exists():
        return False
    try:
        with FileLock(folder / name, timeout=0):
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):
        return False  # Where nobody writes, nobody runs.
