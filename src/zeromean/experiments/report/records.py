"""The records of experiments, read from JSON and checked: a fault names the file and the key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeromean.experiments.report.json_value import JsonValue
from zeromean.experiments.runs.checksum import is_changed
from zeromean.experiments.runs.claims import DIRECTIONS, STATISTICS
from zeromean.experiments.runs.damage import damage_of, refuse
from zeromean.experiments.runs.documents import OURS

KINDS = ("line", "bar", "scatter", "histogram", "image")


@dataclass(frozen=True, kw_only=True)
class RecordedClaim:
    """A claim (`runs.claims`) as a record has it: its author in words, also of older records."""

    metric: str
    label: str
    value: float
    tolerance: float
    direction: str
    """One of DIRECTIONS."""
    unit: str
    author: str
    """Key of a document, or OURS."""
    source: str
    """The author in words, with the place in the document."""
    statistic: str = "mean"
    """One of STATISTICS, over the seeds."""
    seeds_in_run: str = ""
    """Setting with the number of seeds in each run, whose interval is in `.low` and `.high`."""

    @property
    def metrics(self) -> tuple[str, ...]:
        if self.seeds_in_run:
            return f"{self.metric}.low", f"{self.metric}.high"
        return (self.metric,)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One seed of one configuration."""

    config: dict[str, Any]
    """Without the seed."""
    seed: int
    metrics: dict[str, Any]
    seconds: float
    from_scratch: bool
    """Whether these seconds were all that it took: nothing had been computed before."""
    command: str
    """What makes it again; empty where that is not known."""
    environment: dict[str, Any]
    size: str = "full"
    """full, custom, quick or smoke: only full runs are judged."""
    version: int = 1
    """Of the experiment, when it ran."""
    cpu_seconds: float | None = None
    """CPU time of everything that led to its numbers."""
    own: bool = False
    """Whether it is not in the record, but in the reader's own folder of runs."""
    lost: bool = False
    """Whether its commit does not exist."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One series of a figure.

    A histogram without `y` holds the values to count in `x`; an image has `rows` and nothing else.
    """

    name: str
    kind: str
    """One of KINDS."""
    x: list[float | str | None]
    y: list[float | None]
    error: list[float | None]
    """Empty, or as long as y."""
    rows: list[list[float | None]]
    """The pixels of an image, from the top; 0 is the background."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Axes and what is drawn on them."""

    title: str
    x_label: str
    y_label: str
    x_log: bool
    y_log: bool
    traces: list[Trace]


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that is known of one experiment."""

    name: str
    title: str
    source: str
    command: str
    runs: list[Run]
    claims: list[RecordedClaim]
    figures: list[Figure]
    notes: str
    tries: list[list[Run]] = field(default_factory=list)
    """What was shown before, newest first, the runs of one configuration each."""
    version: int = 1
    """Of the experiment, when the record was written; runs of an older one are stale."""
    deterministic: bool = False
    """Whether nothing in it is random, so that one run is enough."""
    changed: bool = False
    """Whether its checksum is that of something else: it was changed by hand."""
    unfinished: list[str] = field(default_factory=list)
    """Own runs that have started and have no result: where, and whether they still run."""
    drawn: list[int] = field(default_factory=list)
    """Seeds that the figures show; empty where that is not known."""
    started: list[int] = field(default_factory=list)
    """Seeds that were started and had no result when the record was written."""


def read_records(folder: Path, on_damage: Callable[[str], object] = refuse) -> dict[str, Record]:
    """The record of every `*.json` file in a folder, by name.

    Args:
        on_damage: Gets a sentence for every file that is not a record, which is left out; the
            default raises a ValueError at the first.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder of records (one JSON file an experiment). `zeromean run "
            "NAME` computes them, `zeromean report --collect` makes records of finished runs."
        )
    records: dict[str, Record] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("."):  # a temporary file of whoever writes records
            continue
        with damage_of(path, on_damage):
            record = read_record(path)
            if record.name in records:
                raise ValueError(f"{path}: name {record.name!r} is that of another record, too.")
            records[record.name] = record
    return records


def read_record(path: Path) -> Record:
    """The record in one file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return parse_record(content, path)


def parse_record(content: Any, path: Path) -> Record:
    """A record from what is in a file, or would be; `path` stands in the messages."""
    return _record(JsonValue(content, path, ""))


def _record(value: JsonValue) -> Record:
    notes, tries, deterministic = (value.get(k) for k in ("notes", "tries", "deterministic"))
    unfinished, drawn, started = (value.get(key) for key in ("unfinished", "drawn", "started"))
    record = Record(
        name=value["name"].text(),
        title=value["title"].text(),
        source=value["source"].text(),
        command=value["command"].text(),
        runs=[_run(item) for item in value["runs"]],
        claims=[_claim(item) for item in value["claims"]],
        figures=[_figure(item) for item in value["figures"]],
        notes=notes.text() if notes else "",
        tries=[[_run(item) for item in each["runs"]] for each in tries] if tries else [],
        version=value["version"].integer() if value.get("version") else 1,
        deterministic=deterministic.flag() if deterministic else False,
        changed=is_changed(value.object()),
        unfinished=[item.text() for item in unfinished] if unfinished else [],
        drawn=[item.integer() for item in drawn] if drawn else [],
        started=[item.integer() for item in started] if started else [],
    )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", record.name):
        value["name"].fail(f"must be letters, digits, '-', '_' and '.', got {record.name!r}.")
    seen: set[str] = set()
    for run, item in zip(record.runs, value["runs"], strict=True):
        # The same seed twice is one measurement, and would make the standard error too small.
        identity = json.dumps([run.own, run.config, run.seed], sort_keys=True)
        if identity in seen:
            item["seed"].fail(f"is {run.seed} for the second time with the same config.")
        seen.add(identity)
    for claim, item in zip(record.claims, value["claims"], strict=True):
        for metric in claim.metrics:
            if record.runs and not any(metric in run.metrics for run in record.runs):
                item["metric"].fail(f"names {metric!r}, which no run has in its metrics.")
            for place in (*value["runs"], *(run for each in tries or () for run in each["runs"])):
                measured = place["metrics"].get(metric)
                if measured and not isinstance(_metrics(place["metrics"])[metric], int | float):
                    measured.fail("must be a number: there is a claim about it.")
    return record


def _run(value: JsonValue) -> Run:
    config = value["config"].object()
    seconds = value["seconds"].number()
    from_scratch, command = value.get("from_scratch"), value.get("command")
    size, version, cpu = (value.get(key) for key in ("size", "version", "cpu_seconds"))
    own, lost = value.get("own"), value.get("lost")
    return Run(
        config={key: setting for key, setting in config.items() if key != "seed"},
        seed=value["seed"].integer(),
        metrics=_metrics(value["metrics"]),
        seconds=seconds,
        from_scratch=from_scratch.flag() if from_scratch else True,
        command=command.text() if command else "",
        environment=value["environment"].object(),
        size=size.text() if size else "full",
        version=version.integer() if version else 1,
        cpu_seconds=cpu.number() if cpu and cpu.content is not None else None,
        own=own.flag() if own else False,
        lost=lost.flag() if lost else False,
    )


def _metrics(value: JsonValue) -> dict[str, Any]:
    """Numbers, and what else there may be; null stands for what was not finite."""
    metrics = dict(value.object())
    for name, content in metrics.items():
        if content is None:
            metrics[name] = math.nan
        elif isinstance(content, int | float) and not isinstance(content, bool):
            metrics[name] = value[name].expect((int, float), "a number")
    return metrics


def _claim(value: JsonValue) -> RecordedClaim:
    unit, author = value.get("unit"), value.get("author")
    statistic, seeds_in_run = value.get("statistic"), value.get("seeds_in_run")
    tolerance = value["tolerance"].number()
    if tolerance < 0:
        value["tolerance"].fail(f"must be at least 0, got {tolerance}.")
    return RecordedClaim(
        metric=value["metric"].text(),
        label=value["label"].text(),
        # Records of earlier versions say “paper” for the number, and not whose it is.
        value=(value.get("paper") or value["value"]).number(),
        tolerance=tolerance,
        direction=value["direction"].choice(DIRECTIONS),
        unit=unit.text() if unit else "",
        # A claim that nobody has signed is no document's.
        author=author.text() if author else OURS,
        source=value["source"].text(),
        statistic=statistic.choice(STATISTICS) if statistic else "mean",
        seeds_in_run=seeds_in_run.text() if seeds_in_run else "",
    )


def _figure(value: JsonValue) -> Figure:
    x_log, y_log = value.get("x_log"), value.get("y_log")
    return Figure(
        title=value["title"].text(),
        x_label=value["x_label"].text(),
        y_label=value["y_label"].text(),
        x_log=x_log.flag() if x_log else False,
        y_log=y_log.flag() if y_log else False,
        traces=[_trace(item) for item in value["traces"]],
    )


def _trace(value: JsonValue) -> Trace:
    kind = value["kind"].choice(KINDS)
    if kind == "image":
        rows = [row.numbers() for row in value["rows"]]
        if len({len(row) for row in rows}) > 1:
            value["rows"].fail("has rows of different lengths.")
        return Trace(name=value["name"].text(), kind=kind, x=[], y=[], error=[], rows=rows)
    x = value["x"].positions()
    y = value.get("y") if kind == "histogram" else value["y"]
    heights = y.numbers() if y else []
    if y and (heights or kind != "histogram") and len(heights) != len(x):
        y.fail(f"has {len(heights)} numbers, but x has {len(x)}.")
    error = value.get("error")
    errors = error.numbers() if error else []
    if error and errors and len(errors) != len(heights):
        error.fail(f"has {len(errors)} numbers, but y has {len(heights)}.")
    return Trace(name=value["name"].text(), kind=kind, x=x, y=heights, error=errors, rows=[])
