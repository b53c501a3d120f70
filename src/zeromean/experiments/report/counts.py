"""How often there is each verdict: of the whole page, and of each document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from zeromean.experiments.report import verdicts
from zeromean.experiments.report.page import Row, Section
from zeromean.experiments.runs.documents import DOCUMENTS


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The verdicts on the claims of one author, or of all documents."""

    name: str
    counts: Counter[str]
    marked: int
    """Verdicts that come from runs which are marked."""

    @property
    def judged(self) -> int:
        return sum(self.counts[verdict] for verdict in verdicts.JUDGED)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The verdicts of the whole page; documents and ourselves are never counted together."""

    documents: Tally
    ours: Tally
    by_document: list[Tally]
    """Of every document that has a claim, in the order of the documents."""
    refuted: list[tuple[Section, Row]]
    """The claims of documents that our runs refute."""
    not_run: int
    """Experiments that have not been run."""


def count_verdicts(sections: list[Section]) -> Counts:
    """Count everything that has a verdict."""
    rows = [(part, row) for part in sections for row in part.rows]
    theirs = [(part, row) for part, row in rows if not row.is_ours]
    authors = {row.author for _, row in theirs}
    known = [key for key in DOCUMENTS if key in authors]
    return Counts(
        documents=_tally("all documents", theirs),
        ours=_tally("bounds of our own", [(part, row) for part, row in rows if row.is_ours]),
        by_document=[
            _tally(
                DOCUMENTS[key].name if key in DOCUMENTS else key,
                [(part, row) for part, row in theirs if row.author == key],
            )
            for key in (*known, *sorted(authors - {*known}))
        ],
        refuted=[(part, row) for part, row in theirs if row.verdict == verdicts.REFUTED],
        not_run=sum(not part.groups and not part.unfinished for part in sections),
    )


def _tally(name: str, rows: list[tuple[Section, Row]]) -> Tally:
    return Tally(
        name=name,
        counts=Counter(row.verdict for _, row in rows),
        marked=sum(bool(part.marks) and row.verdict in verdicts.JUDGED for part, row in rows),
    )
