"""Turns readings into the printed tables and into one JSON record."""

from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import environment
import roster
import torch
from measurements import Reading, Settings
from rows import Row

# Reruns of one and the same row on a shared machine moved by this much.
NOISE = 0.07
FOOTNOTE = (
    "Median of CPU time ratios over alternating pairs in one process, one thread, float32, "
    "[inter-quartile range]. Gaps under 7% are ties."
)


@dataclass(frozen=True)
class Result:
    """A row with its reading, or with the reason why there is none."""

    row: Row
    reading: Reading | None
    problem: str = ""

    @property
    def verdict(self) -> str:
        if self.reading is None:
            return self.problem
        if self.row.must is None or self.row.aim is None:
            return ""
        if self.reading.value <= self.row.aim:
            return "aim reached"
        if self.reading.value <= self.row.must:
            return "reached"
        within_noise = self.reading.value <= self.row.must * (1 + NOISE)
        return "missed by a tie" if within_noise else "MISSED"

    @property
    def value(self) -> str:
        if self.reading is None:
            return "-"
        reading, digits = self.reading, {"ratio": 2, "MiB": 1, "s": 3}[self.row.unit]
        text = f"{reading.value:.{digits}f}"
        if reading.lower == reading.upper:
            return text
        return f"{text} [{reading.lower:.{digits}f}, {reading.upper:.{digits}f}]"


def tables(results: list[Result]) -> str:
    """Markdown tables, one a group, aligned so that they also read well in a terminal."""
    parts = []
    for group, members in groupby(results, key=lambda result: result.row.group):
        parts.append(f"### {group}\n\n{_table(list(members))}\n")
    return "\n".join([*parts, FOOTNOTE])


def write(path: Path, results: list[Result], settings: Settings) -> None:
    record = environment.describe() | {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "packages": roster.versions(),
        "settings": asdict(settings),
        "rows": [_as_dict(result) for result in results],
    }
    environment.write(path, record)


def _table(results: list[Result]) -> str:
    lines = [["", results[0].row.unit, "must reach", "aim", "verdict"]]
    for result in results:
        bounds = ["" if bound is None else f"{bound:g}" for bound in _bounds(result.row)]
        lines.append([result.row.name, result.value, *bounds, result.verdict])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _as_dict(result: Result) -> dict:
    row = result.row
    fields = {"group": row.group, "name": row.name, "unit": row.unit}
    fields |= {"must_reach": row.must, "aim": row.aim, "verdict": result.verdict}
    return fields | (asdict(result.reading) if result.reading else {})


def _bounds(row: Row) -> tuple[float | None, float | None]:
    return row.must, row.aim
