"""The command line: `zeromean demo`, or `python -m zeromean demo`.

A command is a dataclass, which tyro turns into options, with a `run` method that imports what it
needs (so that `--help` stays fast) and returns an exit code. `COMMANDS` lists them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import zeromean

# What the extra `cli` brings, by the names under which it is imported.
REQUIREMENTS = ("matplotlib", "rich", "sklearn", "tyro")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Show what a variance network is, in about a minute: a table, and pictures in a folder.

    Trains a deterministic network, one with dropout and a variance network on scikit-learn's
    digits, and the toy problem of Figure 1.
    """

    output: Path = Path("demo")
    """Folder for the pictures; created if need be."""
    seed: int = 0
    """Seed of everything random: the same seed gives the same numbers."""

    def run(self) -> int:
        if not 0 <= self.seed < 2**32:
            return _refuse(f"--seed must lie between 0 and 2³² − 1, got {self.seed}.")
        try:
            _require_writable(self.output)
            from zeromean.demo import run_demo

            run_demo(self.output, seed=self.seed)
        except OSError as error:
            reason = error.strerror or error
            return _refuse(f"cannot write into {self.output}: {reason}; choose another --output.")
        return 0


class Command(Protocol):
    """What `main` asks of a command."""

    def run(self) -> int: ...


COMMANDS: dict[str, Callable[..., Command]] = {"demo": Demo}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for what the user can mend, 130 for Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"zeromean {zeromean.__version__}")
        return 0
    missing = [name for name in REQUIREMENTS if find_spec(name) is None]
    if missing:
        return _refuse(
            f"the command line needs {', '.join(missing)}; run: pip install 'zeromean[cli]'"
        )
    try:
        return _parse(arguments).run()
    except KeyboardInterrupt:
        print("zeromean: interrupted.", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> Command:
    import tyro

    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="zeromean",
        description="Networks whose weights are random. `zeromean --version` prints the version.",
        args=arguments,
    )


def _require_writable(folder: Path) -> None:
    """Find out before the work, not after it, that its results have nowhere to go."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _refuse(sentence: str) -> int:
    print(f"zeromean: {sentence}", file=sys.stderr)
    return 2
