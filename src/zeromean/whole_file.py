"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Another path to write to, which becomes `path` at the end of the block.

    After an exception nothing is left of it, and what stood under the name before still does.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent}; create it first.")
    # Other processes may write the same file; some writers look at the ending.
    temporary = path.with_name(f".{uuid4().hex}.{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
