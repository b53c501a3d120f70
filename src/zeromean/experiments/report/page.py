"""What the page says of each experiment, ready to be printed: text, no more numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from zeromean.experiments.report import verdicts
from zeromean.experiments.report.figures import describe, plot
from zeromean.experiments.report.formats import (
    format_flags,
    format_measured,
    format_number,
    format_seconds,
    format_seeds,
    format_setting,
    format_summary,
    in_words,
    with_unit,
)
from zeromean.experiments.report.notes import fill
from zeromean.experiments.report.records import Record, RecordedClaim, Run
from zeromean.experiments.report.verdicts import bounds, judge, measure, summarize
from zeromean.experiments.runs.documents import OURS

STALE_NOTES = "Its notes are about the experiment as it is now, and wait for runs of it."


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim next to our number."""

    metric: str
    label: str
    author: str
    """Key of a document, or OURS."""
    source: str
    claimed: str
    ours: str
    count: int
    """Number of seeds."""
    rule: str
    verdict: str

    @property
    def is_ours(self) -> bool:
        return self.author == OURS


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one configuration. Runs of different ones are never averaged."""

    size: str
    """full, custom, quick or smoke."""
    marks: list[str]
    """Why they are to be taken with care: stale, no clean commit."""
    commands: list[str]
    """What makes the runs again."""
    rows: list[Row]
    metrics: list[tuple[str, str, int]]
    """Name, mean ± standard error, number of seeds."""
    config: list[tuple[str, str, bool]]
    """Key, value, whether it differs from the first configuration."""
    epochs: str
    """Empty where nothing is trained by epochs; for each network where they differ."""
    seeds: str
    num_runs: int
    duration: str
    cpu: str
    """CPU time from scratch; empty where it is not known."""
    environments: list[tuple[str, list[tuple[str, str]]]]
    """Seeds, and the environment in which they ran."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure, and its words."""

    title: str
    description: str
    plot: dict[str, Any]
    has_numbers: bool
    """Whether a table of the numbers makes sense: not of pixels."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One experiment."""

    name: str
    title: str
    source: str
    command: str
    groups: list[Group]
    """Empty: not run. The claims are judged by the first."""
    tries: list[Group]
    """What was shown before, newest first."""
    marks: list[str]
    """Why what is shown is to be taken with care."""
    rows: list[Row]
    figures: list[Plot]
    drawn: str
    """Which seeds the figures show, in a sentence; empty where they are all."""
    notes: list[str]
    unfinished: list[str]
    """Own runs that have started and have no result: where, and whether they still run."""

    @property
    def state(self) -> str:
        """What to say of an experiment that has no finished run."""
        return "interrupted" if self.unfinished else verdicts.NOT_RUN

    @property
    def document_rows(self) -> list[Row]:
        return [row for row in self.rows if not row.is_ours]

    @property
    def our_rows(self) -> list[Row]:
        return [row for row in self.rows if row.is_ours]

    @property
    def counts(self) -> Counter[str]:
        """How many claims of documents there are of each verdict."""
        return Counter(row.verdict for row in self.document_rows)

    @property
    def our_counts(self) -> Counter[str]:
        """The same for our own bounds."""
        return Counter(row.verdict for row in self.our_rows)

    @property
    def judged(self) -> int:
        """How many claims of documents have a verdict."""
        return sum(self.counts[verdict] for verdict in verdicts.JUDGED)


def section(name: str, title: str, record: Record | None, *, version: int | None = None) -> Section:
    """An experiment as its record tells it, or as one that has not been run.

    Args:
        version: That of the experiment today; default: as the record says.
    """
    if record is None:
        record = Record(
            name=name,
            title=title,
            source="",
            command=f"zeromean run {name}",
            runs=[],
            claims=[],
            figures=[],
            notes="",
        )
    by_config: dict[str, list[Run]] = {}
    for run in record.runs:
        by_config.setdefault(json.dumps([run.own, run.config], sort_keys=True), []).append(run)
    today = max(record.version, version or 0)
    shown = next(iter(by_config.values()), [])
    groups = [_group(runs, record, shown[0], today) for runs in by_config.values()]
    return Section(
        name=record.name,
        title=record.title or title or name,
        source=record.source,
        command=record.command,
        groups=groups,
        tries=[_group(runs, record, shown[0], today) for runs in record.tries if runs and shown],
        marks=(groups[0].marks if groups else []) + _marks_of_record(record),
        rows=groups[0].rows if groups else [_row(claim, [], record) for claim in record.claims],
        figures=[
            Plot(
                title=figure.title,
                description=describe(figure),
                plot=plot(figure),
                has_numbers=all(trace.kind != "image" for trace in figure.traces),
            )
            for figure in record.figures
        ],
        drawn=_drawn(record, shown),
        notes=_notes(record, shown, today),
        unfinished=record.unfinished,
    )


def _group(runs: list[Run], record: Record, first: Run, today: int) -> Group:
    runs = sorted(runs, key=lambda run: run.seed)
    total = sum(run.seconds for run in runs)
    each = f", {format_seconds(total / len(runs))} each" if len(runs) > 1 else ""
    if not all(run.from_scratch for run in runs):
        each += " (without what had been trained before)"
    cpu = [run.cpu_seconds for run in runs if run.cpu_seconds is not None]
    return Group(
        size=runs[0].size,
        marks=_marks(runs, today),
        commands=[run.command for run in runs if run.command],
        rows=[_row(claim, runs, record) for claim in record.claims],
        metrics=_metrics(runs),
        config=[
            (key, format_setting(value), key not in first.config or first.config[key] != value)
            for key, value in runs[0].config.items()
        ],
        epochs=_epochs(runs[0]),
        seeds=format_seeds([run.seed for run in runs]),
        num_runs=len(runs),
        duration=format_seconds(total) + each,
        cpu=format_seconds(sum(cpu)) if len(cpu) == len(runs) else "",
        environments=_environments(runs),
    )


def _marks(runs: list[Run], today: int) -> list[str]:
    """Why some runs are to be taken with care."""
    marks = []
    if any(run.own for run in runs):
        marks.append("own run, not in the records")
    oldest = min(run.version for run in runs)
    if oldest < today:
        marks.append(f"stale: version {oldest} of the experiment, which is at {today}")
    commits = [str(run.environment.get("commit", "unknown")) for run in runs]
    if any(run.lost for run in runs):
        marks.append("its commit does not exist")
    elif any(commit == "unknown" or commit.endswith("+") for commit in commits):
        marks.append("no clean commit")
    return marks


def _marks_of_record(record: Record) -> list[str]:
    marks = []
    if record.started:
        marks.append(f"started and not in it: {in_words(record.started)}")
    if record.changed:
        marks.append(f"changed by hand: {record.name}.json")
    return marks


def _drawn(record: Record, shown: list[Run]) -> str:
    known = record.figures and record.drawn
    everything = {run.seed for run in shown}
    if not known or {*record.drawn} == everything:
        return ""
    return f"The figures show {in_words(record.drawn)} alone."


def _notes(record: Record, shown: list[Run], today: int) -> list[str]:
    """Paragraphs, with the numbers of the runs that are shown."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", record.notes) if part.strip()]
    if paragraphs and any(run.version < today for run in shown):
        return [STALE_NOTES]
    return [fill(part, shown, record.claims) for part in paragraphs]


def _row(claim: RecordedClaim, runs: list[Run], record: Record) -> Row:
    ours = measure(claim, runs, deterministic=record.deterministic)
    low, high = (format_number(bound, 6) for bound in bounds(claim))
    rules = {"at least": f"≥ {low}", "at most": f"≤ {high}", "equal": f"{low} to {high}"}
    prefix = {"at least": "≥ ", "at most": "≤ ", "equal": ""}[claim.direction]
    verdict = verdicts.NOT_RUN
    if runs:
        verdict = judge(claim, ours) if runs[0].size == "full" else verdicts.NOT_JUDGED
    return Row(
        metric=claim.metric,
        label=claim.label,
        author=claim.author,
        source=claim.source,
        claimed=prefix + with_unit(format_number(claim.value, 6), claim.unit),
        ours=with_unit(format_measured(ours), claim.unit) if ours else "—",
        count=ours.count if ours else 0,
        rule=with_unit(rules[claim.direction], claim.unit),
        verdict=verdict,
    )


def _metrics(runs: list[Run]) -> list[tuple[str, str, int]]:
    """Every metric that is a number, or says yes or no."""
    table = []
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        values = [run.metrics[name] for run in runs if name in run.metrics]
        if all(isinstance(value, bool) for value in values):
            table.append((name, format_flags(values), len(values)))
        elif all(isinstance(value, int | float) for value in values):
            table.append((name, format_summary(summarize(values)), len(values)))
    return table


def _epochs(run: Run) -> str:
    """As the metrics of its networks say, or as its settings do."""
    networks: dict[str, list[str]] = {}
    for key, value in run.metrics.items():
        if key.endswith(".epochs") and isinstance(value, int | float):
            networks.setdefault(format_number(value), []).append(key.removesuffix(".epochs"))
    if len(networks) > 1:
        return "epochs: " + "; ".join(
            f"{', '.join(names)} {epochs}" for epochs, names in networks.items()
        )
    epochs = next(iter(networks), run.config.get("epochs"))
    return f"{epochs} epochs" if epochs else ""


def _environments(runs: list[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    by_content: dict[str, list[Run]] = {}
    for run in runs:
        by_content.setdefault(json.dumps(run.environment, sort_keys=True), []).append(run)
    return [
        (
            format_seeds([run.seed for run in group]),
            [(key, format_setting(value)) for key, value in group[0].environment.items()],
        )
        for group in by_content.values()
    ]
