"""`zeromean report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromean.commands.messages import tell

RECORDS = Path("results/experiments")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one web page from the records and your own runs: documents' numbers next to ours."""

    results: Path | None = None
    """Folder of the records, one JSON file an experiment; default: results/experiments."""
    output: Path = Path("report.html")
    """The page."""
    markdown: Path | None = None
    """Write the tables of the records into this file too, as Markdown; without your own runs."""
    collect: bool = False
    """First make the records from the finished runs."""
    runs: Path = Path("runs")
    """Folder of your own runs, which are shown next to the records, and for --collect."""

    def run(self) -> int:
        from zeromean.experiments.report import build, build_markdown
        from zeromean.experiments.report.records import parse_record, read_records
        from zeromean.experiments.runs import records
        from zeromean.experiments.runs.damage import damage_of

        refused: list[str] = []

        def refuse(sentence: str) -> None:
            if sentence not in refused:
                refused.append(sentence)

        results = RECORDS if self.results is None else self.results
        if self.collect:
            for path in records.collect(self.runs, results, refuse):
                print(f"wrote {path}")
        # A folder that was asked for must be there; without one, own runs are enough.
        asked_for = self.results is not None and not self.collect
        has_records = results.is_dir() or asked_for or not self.runs.is_dir()
        found = dict(read_records(results, refuse)) if has_records else {}
        own = records.with_own_runs(results if has_records else None, self.runs, refuse)
        for name, content in own.items():
            # The others are as they were read, and what is wrong with them has been said.
            if content.get("unfinished") or any(run.get("own") for run in content["runs"]):
                with damage_of(self.runs / name, refuse):
                    found[name] = parse_record(content, self.runs / name)
        known = _registry()
        build(found, self.output, known, refuse)
        print(f"wrote {self.output}")
        if self.markdown is not None:
            figures = "`zeromean report` draws the figures, in one page that works offline."
            build_markdown(results, self.markdown, known, figures=figures, on_damage=refuse)
            print(f"wrote {self.markdown}")
        return tell(refused)


def _registry() -> Any:
    """What there is to report on."""
    from zeromean.experiments import registry
    from zeromean.experiments.report import Registry
    from zeromean.experiments.runs import documents

    missing = documents.not_reproduced(registry.covered())
    return Registry(
        titles={name: entry.title for name, entry in registry.REGISTRY.items()},
        versions={name: registry.version(name) for name in registry.REGISTRY},
        missing={
            document: [(item.place, item.what, item.why_not) for item in items]
            for document, items in missing.items()
        },
        covers={
            name: [
                (documents.DOCUMENTS[item.document].name, item.place, item.what)
                for item in documents.ITEMS
                if item.key in registry.load(name).COVERS
            ]
            for name in registry.REGISTRY
        },
    )
