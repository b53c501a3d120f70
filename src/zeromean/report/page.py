"""What the page says of each experiment, ready to be printed: text, no more numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from zeromean.report import verdicts
from zeromean.report.figures import describe, plot
from zeromean.report.formats import (
    format_number,
    format_seconds,
    format_seeds,
    format_setting,
    format_summary,
    with_unit,
)
from zeromean.report.records import Claim, Record, Run
from zeromean.report.verdicts import bounds, judge, summarize


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim beside our number."""

    label: str
    source: str
    paper: str
    ours: str
    count: int
    rule: str
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one configuration. Runs of different ones are never averaged."""

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
    rows: list[Row]
    figures: list[Plot]
    notes: list[str]

    @property
    def counts(self) -> Counter[str]:
        """How many claims there are of each verdict."""
        return Counter(row.verdict for row in self.rows)

    @property
    def judged(self) -> int:
        """How many claims have been measured."""
        return len(self.rows) - self.counts[verdicts.NOT_RUN] - self.counts[verdicts.NOT_MEASURED]


def section(name: str, title: str, record: Record | None) -> Section:
    """An experiment as its record tells it, or as one that has not been run."""
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
        by_config.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
    groups = [_group(runs, record.claims, record.runs[0]) for runs in by_config.values()]
    return Section(
        name=record.name,
        title=record.title or title or name,
        source=record.source,
        command=record.command,
        groups=groups,
        rows=groups[0].rows if groups else [_row(claim, []) for claim in record.claims],
        figures=[
            Plot(
                title=figure.title,
                description=describe(figure),
                plot=plot(figure),
                has_numbers=all(trace.kind != "image" for trace in figure.traces),
            )
            for figure in record.figures
        ],
        notes=[part.strip() for part in re.split(r"\n\s*\n", record.notes) if part.strip()],
    )


def count_verdicts(sections: list[Section]) -> Counter[str]:
    """The verdicts of the whole page, with `total` of those that were measured."""
    counts = sum((part.counts for part in sections), Counter[str]())
    counts["total"] = sum(part.judged for part in sections)
    counts["experiments not run"] = sum(not part.groups for part in sections)
    return counts


def _group(runs: list[Run], claims: list[Claim], first: Run) -> Group:
    runs = sorted(runs, key=lambda run: run.seed)
    total = sum(run.seconds for run in runs)
    each = f", {format_seconds(total / len(runs))} each" if len(runs) > 1 else ""
    if not all(run.from_scratch for run in runs):
        each += " (without what had been trained before)"
    return Group(
        commands=[run.command for run in runs if run.command],
        rows=[_row(claim, runs) for claim in claims],
        metrics=_metrics(runs),
        config=[
            (key, format_setting(value), key not in first.config or first.config[key] != value)
            for key, value in runs[0].config.items()
        ],
        epochs=_epochs(runs[0]),
        seeds=format_seeds([run.seed for run in runs]),
        num_runs=len(runs),
        duration=format_seconds(total) + each,
        environments=_environments(runs),
    )


def _row(claim: Claim, runs: list[Run]) -> Row:
    ours = summarize([run.metrics[claim.metric] for run in runs if claim.metric in run.metrics])
    low, high = (format_number(bound, 6) for bound in bounds(claim))
    rules = {"at least": f"≥ {low}", "at most": f"≤ {high}", "equal": f"{low} to {high}"}
    prefix = {"at least": "≥ ", "at most": "≤ ", "equal": ""}[claim.direction]
    return Row(
        label=claim.label,
        source=claim.source,
        paper=prefix + with_unit(format_number(claim.paper, 6), claim.unit),
        ours=with_unit(format_summary(ours), claim.unit) if ours else "—",
        count=ours.count if ours else 0,
        rule=with_unit(rules[claim.direction], claim.unit),
        verdict=judge(claim, ours) if runs else verdicts.NOT_RUN,
    )


def _metrics(runs: list[Run]) -> list[tuple[str, str, int]]:
    """Every metric that is a number."""
    table = []
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        values = [run.metrics[name] for run in runs if name in run.metrics]
        if all(isinstance(value, int | float) for value in values):
            table.append((name, format_summary(summarize(values)), len(values)))
    return table


def _epochs(run: Run) -> str:
    """As the metrics of its networks say, or as its settings do."""
    networks: dict[str, list[str]] = {}
    for key, value in run.metrics.items():
        if key.endswith(".epochs"):
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
