"""What commands say to who has started them, and check before they work."""

from __future__ import annotations

import difflib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def nearest(name: str, names: Sequence[str]) -> str:
    bare = {each.strip("-"): each for each in names}  # All options begin alike.
    nearest = difflib.get_close_matches(name.strip("-"), bare, n=1, cutoff=0.4)
    return f"did you mean {bare[nearest[0]]}?" if nearest else f"there are {', '.join(names)}."


def require_writable(folder: Path) -> None:
    """Find out before the work, not after it, that its results have nowhere to go."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def tell(damages: Sequence[str]) -> int:
    """Say what could not be read; the rest has been shown. Returns the exit code."""
    for sentence in dict.fromkeys(damages):
        refuse(sentence)
    return 2 if damages else 0


def refuse(sentence: str) -> int:
    print(f"zeromean: {sentence}", file=sys.stderr)
    return 2
