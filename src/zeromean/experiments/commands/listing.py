"""`zeromean list`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zeromean.commands.messages import tell


@dataclass(frozen=True, kw_only=True)
class List:
    """Show the tables and figures, what they need, and which have been run here."""

    runs: Path = Path("runs")
    """Folder of the runs."""

    def run(self) -> int:
        from rich.console import Console
        from rich.table import Table

        from zeromean.experiments import registry
        from zeromean.experiments.runs import records

        damages: list[str] = []
        table = Table(box=None, pad_edge=False)
        for heading in ("name", "what it shows", "data", f"in {self.runs}"):
            table.add_column(heading)
        for name, entry in registry.REGISTRY.items():
            needs = ", ".join(entry.needs) or "–"
            found = records.status(name, self.runs, damages.append)
            table.add_row(name, entry.title, needs, found)
        Console().print(table)
        return tell(damages)
