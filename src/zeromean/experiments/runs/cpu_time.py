"""CPU time of work that several processes have done one after the other."""

from __future__ import annotations

import json
import time
from pathlib import Path

from zeromean.experiments.runs.json_files import write_json


class CpuTime:
    """CPU seconds of a piece of work, kept in a file next to its results.

    What an interrupted process did after its last `save` is not counted: it is done again.

    Args:
        path: The file, which may hold the seconds of earlier processes.
    """

    def __init__(self, path: Path):
        self.path = path
        self._earlier = _read(path)
        self._start = time.process_time()
        self._elsewhere = 0.0

    @property
    def seconds(self) -> float:
        return self._earlier + time.process_time() - self._start - self._elsewhere

    @property
    def seconds_here(self) -> float:
        """Those of this process alone."""
        return self.seconds - self._earlier

    def leave_out(self, seconds: float) -> None:
        """Do not count so many seconds of this process, which belong to other work."""
        self._elsewhere += seconds

    def save(self) -> None:
        write_json(self.path, {"cpu_seconds": round(self.seconds, 1)})


def _read(path: Path) -> float:
    try:
        return float(json.loads(path.read_bytes())["cpu_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
