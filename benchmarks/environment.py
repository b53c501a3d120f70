"""What a record says of where it was made, and how it is written."""

import datetime
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from zeromean.files.atomic import whole_file


def describe(*packages: str) -> dict[str, Any]:
    """Date, interpreter, processor and the versions of the packages."""
    described: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
    }
    return described | (
        {"packages": {name: _version(name) for name in packages}} if packages else {}
    )


def write(path: Path, record: dict[str, Any]) -> None:
    """Writes the record whole or not at all: an interrupted run leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
