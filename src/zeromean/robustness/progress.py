"""A progress bar where there is a terminal to show it on, and rich to draw it with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress_bar(title: str, total: int, show: bool) -> Iterator[Callable[[], None]]:
    """A function to call after each of so many steps."""
    if not show or not sys.stdout.isatty() or find_spec("rich") is None:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
