"""`zeromean verify`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromean.commands.messages import refuse, require_writable
from zeromean.experiments.commands.report import RECORDS


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run an experiment with a seed that no record has, and compare it number by number.

    Says of each number whether it lies in the 99% prediction interval of the record's seeds
    (Student's t, corrected for how many numbers there are). The exit code is 1 where one does not.
    """

    name: str
    """The experiment."""
    seed: int | None = None
    """The fresh seed; default: the smallest from 1000 on that no record has."""
    quick: bool = False
    """Compare runs of the quick size, those in the record and in --own."""
    results: Path = RECORDS
    """Folder of the records."""
    own: Path = Path("runs")
    """Folder of finished runs, which count as a record where there is none."""
    runs: Path = Path("runs/verify")
    """Folder of the fresh runs, which share nothing with the others."""
    data_dir: Path | None = None
    """Folder of the data sets; default: $ZEROMEAN_DATA, else the cache folder of this system."""
    quiet: bool = False
    """Print the table only."""

    def run(self) -> int:
        from zeromean.experiments.runs import runner, verify

        size = "quick" if self.quick else "full"
        reference = verify.reference(self.name, self.results, size=size, runs=self.own)
        seed = reference.seed(self.seed)
        try:
            require_writable(self.runs)
        except OSError as error:
            reason = error.strerror or error
            return refuse(f"cannot write into {self.runs}: {reason}; choose another --runs.")
        place = runner.Place(runs=self.runs, data_dir=self.data_dir, progress=not self.quiet)
        before = verify.finished_before(reference, seed, place)
        if before:
            print(f"seed {seed} was run before, at commit {before}; --seed N runs another.")
        folder = verify.fresh_run(reference, seed, place)
        done = runner.read_json(folder / "done.json", "metrics")
        compared = verify.compare(reference, done["metrics"])
        _print_comparison(compared, seed, len(reference.runs))
        return int(any(each.verdict == verify.OUTSIDE for each in compared))


def _print_comparison(compared: Sequence[Any], seed: int, num_seeds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from zeromean.experiments.report.formats import format_number
    from zeromean.experiments.runs import verify

    table = Table(box=None, pad_edge=False)
    for heading in ("number", f"mean of {num_seeds}", "99% interval", f"seed {seed}", ""):
        table.add_column(heading)
    for each in compared:
        ends = "–" if each.interval is None else ", ".join(map(format_number, each.interval))
        row = (each.metric, format_number(each.mean), ends, format_number(each.fresh))
        table.add_row(*row, each.verdict, style="bold" if each.verdict == verify.OUTSIDE else None)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    counts = {
        verdict: sum(each.verdict == verdict for each in compared)
        for verdict in (verify.INSIDE, verify.OUTSIDE, verify.NO_SPREAD)
    }
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + ".")
