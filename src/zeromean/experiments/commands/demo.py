"""`zeromean demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zeromean.commands.messages import refuse, require_writable


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
            return refuse(f"--seed must lie between 0 and 2³² − 1, got {self.seed}.")
        try:
            require_writable(self.output)
            from zeromean.experiments.demo import run_demo

            run_demo(self.output, seed=self.seed)
        except OSError as error:
            reason = error.strerror or error
            return refuse(f"cannot write into {self.output}: {reason}; choose another --output.")
        return 0
