"""What to say of files that cannot be read, while the others are shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


def refuse(sentence: str) -> NoReturn:
    """Stop at the first damage."""
    raise ValueError(sentence)


@contextmanager
def damage_of(path: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Tell what is wrong where the block cannot read a file: a sentence that names it.

    What a file can hold in place of what belongs there ends in errors of every kind. Those of the
    disk pass: it is not the file that is damaged.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        sentence = " ".join(str(error).split())
        if not isinstance(error, ValueError) or f"{path.parent}{os.sep}" not in sentence:
            reason = repr(error) if len(repr(error)) <= 120 else f"{repr(error)[:117]}..."
            sentence = f"{path} is damaged ({reason}); move it away, or make it again."
        tell(sentence)


def require_numbers(metrics: Mapping[str, Any]) -> None:
    """Refuse integers that no floating-point number can hold."""
    for name, value in metrics.items():
        try:
            float(value or 0)
        except OverflowError:
            raise ValueError(f"{name} is too large for a number") from None
