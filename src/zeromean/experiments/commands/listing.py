"""`zeromean list`."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeromean.commands.messages import tell
from zeromean.text_table import text_table

Row = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True)
class List:
    """Show the tables and figures, what they need, and which have been run here."""

    runs: Path = Path("runs")
    """Folder of the runs."""

    def run(self) -> int:
        from zeromean.experiments import registry
        from zeromean.experiments.runs import records

        damages: list[str] = []
        rows = [("name", "what it shows", "data", f"in {self.runs}")]
        for name, entry in registry.REGISTRY.items():
            needs = ", ".join(entry.needs) or "–"
            rows.append((name, entry.title, needs, records.status(name, self.runs, damages.append)))
        # rich would wrap lines too; importing it takes as long as all of this.
        width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
        print("\n".join(text_table(list(_wrapped(rows, width)), left=range(4))))
        return tell(damages)


def _wrapped(rows: Sequence[Row], width: int) -> Iterator[Row]:
    """Rows in which what an experiment shows goes on in the next line where it is too long."""
    others = sum(max(len(row[column]) for row in rows) + 2 for column in (0, 2, 3))
    for name, title, needs, found in rows:
        first, *rest = textwrap.wrap(title, max(width - others, 24))
        yield name, first, needs, found
        yield from (("", line, "", "") for line in rest)
