"""`zeromean doctor`: what is installed here and what is missing, devices, threads, data.

It has to work where little does: nothing outside of the standard library is taken for granted, not
even torch, and its options are argparse's.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import zeromean
from zeromean.extras import Extra

# Of those who use the package; `dev` and `docs` are for a checkout.
EXTRAS = tuple(extra for extra in get_args(Extra) if extra not in ("docs", "dev"))
_REQUIREMENT = re.compile(
    r"^(?P<name>[\w.-]+)\s*(\[(?P<extras>[^]]*)\])?\s*(?P<version>[^;]*?)\s*"
    r"(;\s*extra\s*==\s*['\"](?P<extra>[\w-]+)['\"])?$"
)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show versions, devices, what each extra has and lacks, and where data are looked for.

    The exit code is 0, but 1 where torch itself does not work.
    """

    data_dir: Path | None = None
    """Folder of the data sets; default: $ZEROMEAN_DATA, else the cache folder of this system."""

    def run(self) -> int:
        works = True
        lines = list(_versions())
        try:
            lines += _devices()
        except Exception as error:  # A broken torch ends in errors of every kind.
            works = False
            lines.append(("torch", f"does not work: {type(error).__name__}: {error}"))
        _show("zeromean doctor", lines)
        _show("extras", list(_extras()))
        if works:
            _show("data", list(_data(self.data_dir)))
        return 0 if works else 1

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Doctor:
        """Its options, without the packages that the other commands need for theirs."""
        parser = argparse.ArgumentParser(
            prog="zeromean doctor", description=(cls.__doc__ or "").splitlines()[0]
        )
        parser.add_argument("--data-dir", type=Path, help="folder of the data sets")
        return cls(data_dir=parser.parse_args(list(arguments)).data_dir)


def _show(title: str, lines: Sequence[tuple[str, str]]) -> None:
    print(title)
    width = max((len(name) for name, _ in lines), default=0)
    for name, text in lines:
        print(f"  {name:{width}}  {text}".rstrip())


def _versions() -> Iterator[tuple[str, str]]:
    yield "zeromean", f"{zeromean.__version__} ({Path(zeromean.__file__).parent})"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for name in ("torch", "numpy"):
        yield name, _version(name) or f"missing; pip install {name}"
    yield "system", platform.platform()


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    # A library that is there may still not compute.
    if float((torch.ones(2, 2) @ torch.ones(2, 2)).sum()) != 8:
        raise RuntimeError("a product of matrices is wrong")
    torch.ones(2).numpy()
    from zeromean.training.precision import computes_in_bfloat16

    kernels = torch.backends.cpu.get_cpu_capability()
    bfloat16 = "fast" if computes_in_bfloat16() else "emulated: use float32"
    yield "CPU", f"{_processor()}, {kernels}; bfloat16 is {bfloat16}"
    setting = os.environ.get("OMP_NUM_THREADS")
    asked = "" if setting is None else f", OMP_NUM_THREADS={setting}"
    yield "threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores{asked}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            yield f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    else:
        built = torch.version.cuda
        yield "CUDA", "none" if built is None else f"none, though torch is built for CUDA {built}"
    mps = "available" if torch.backends.mps.is_available() else "none"
    yield "MPS", mps


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _extras() -> Iterator[tuple[str, str]]:
    # Here, for it takes as long to import as everything else that the other commands need.
    from importlib import metadata

    try:
        declared = metadata.requires("zeromean") or []
    except metadata.PackageNotFoundError:
        yield "", "not known: zeromean itself is not installed; pip install . in a checkout"
        return
    for extra in EXTRAS:
        needed = _requirements(declared, extra)
        found = {name: _version(name) for name in needed}
        lacking = [
            f"{name}{wanted}"
            for name, wanted in needed.items()
            if not _is_at_least(found[name], wanted)
        ]
        if not lacking:
            yield extra, "installed: " + ", ".join(f"{n} {v}" for n, v in found.items())
            continue
        packages = " ".join(f"'{each}'" for each in lacking)
        yield extra, f"missing {', '.join(lacking)}; pip install {packages}"


def _requirements(declared: Sequence[str], extra: str) -> dict[str, str]:
    """Packages of an extra, those of the extras in it too, and the versions that are wanted."""
    found: dict[str, str] = {}
    for line in declared:
        match = _REQUIREMENT.match(line)
        if match is None or match["extra"] != extra:
            continue
        if match["name"] == "zeromean":
            for inner in (match["extras"] or "").split(","):
                found |= _requirements(declared, inner.strip())
        else:
            found[match["name"]] = match["version"]
    return found


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_at_least(version: str | None, wanted: str) -> bool:
    """Whether a version is there and no older than ">=1.2", the only kind that is asked for."""
    if version is None:
        return False
    return _numbers(version) >= _numbers(wanted)


def _numbers(version: str) -> list[int]:
    digits = re.search(r"\d+(\.\d+)*", version)
    return [int(part) for part in digits[0].split(".")] if digits else []


def _data(data_dir: Path | None) -> Iterator[tuple[str, str]]:
    from zeromean.data.catalogue import CATALOGUE
    from zeromean.data.loading import FOLDER_VARIABLE, data_folder

    try:
        folder: Any = data_folder(data_dir)
    except (ImportError, ValueError) as error:
        yield "folder", str(error)
        return
    where = f"from {FOLDER_VARIABLE}" if os.environ.get(FOLDER_VARIABLE) else "this system's cache"
    yield "folder", f"{folder} ({'from --data-dir' if data_dir else where})"
    for name, files in CATALOGUE.items():
        missing = [file for file in files.files if not (folder / file.path).exists()]
        if not missing:
            yield name, f"there; `zeromean data {name}` checks the files"
        elif len(missing) == len(files.files):
            yield name, f"missing; `zeromean data {name}` fetches it"
        else:
            count = len(files.files)
            yield (
                name,
                f"{count - len(missing)} of {count} files; `zeromean data {name}` says which",
            )
