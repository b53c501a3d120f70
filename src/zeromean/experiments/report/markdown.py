"""The tables of the report as Markdown, for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeromean.experiments.report.counts import Counts, count_verdicts
from zeromean.experiments.report.page import Group, Row, Section
from zeromean.experiments.report.verdicts import JUDGED, RULE
from zeromean.experiments.runs.documents import OURS


def to_markdown(
    sections: list[Section],
    figures: str,
    pictures: Mapping[str, Path] | None = None,
    missing: Mapping[str, Sequence[tuple[str, str, str]]] | None = None,
) -> str:
    """A page with every claim that has been measured.

    Args:
        figures: A sentence that says where figures to look closer at are.
        pictures: Files of pictures by experiment.
        missing: What no experiment covers, by document: place, what it shows, why not.
    """
    pictures = pictures or {}
    run = [part for part in sections if part.groups]
    waiting = [part for part in sections if not part.groups]
    counts = count_verdicts(sections)
    parts = [
        "# Results",
        "<!-- Written by `zeromean report --markdown`; changes are lost. -->",
        "What the documents claim, and what our runs say of it. Bounds of our own are counted "
        "apart. “Marked” are the verdicts that come from records to be taken with care: stale, "
        "without a clean commit, or with a seed that is missing.",
        _counted(counts),
        *_refuted(counts),
        f"**How to read it.** {RULE}",
        f"{figures} [Reproduce](reproduce.md) says how to run everything.",
        "## By experiment",
        _overview(run),
        *(_section(part, pictures.get(part.name)) for part in run),
    ]
    if waiting:
        names = ", ".join(f"`{part.name}`" for part in waiting)
        parts += ["## Not run at full size yet", f"{names}."]
    if missing:
        parts += ["## Not reproduced", *_missing(missing)]
    return "\n\n".join(parts) + "\n"


def _counted(counts: Counts) -> str:
    tallies = [*counts.by_document, counts.documents, counts.ours]
    cells = [("claims of", "judged", *JUDGED, "marked"), ("---",) * (3 + len(JUDGED))]
    for tally in tallies:
        row = (
            tally.name,
            str(tally.judged),
            *(str(tally.counts[verdict]) for verdict in JUDGED),
            str(tally.marked),
        )
        total = tally in (counts.documents, counts.ours)
        cells.append(tuple(f"**{cell}**" for cell in row) if total else row)
    return _lines(cells)


def _refuted(counts: Counts) -> list[str]:
    """What our runs speak against: a reader should not have to look for it."""
    if not counts.refuted:
        return []
    lines = [
        f"- [{part.name}](#{_anchor(part)}): {row.label}; {row.claimed} said, {row.ours} measured"
        for part, row in counts.refuted
    ]
    return ["Refuted, of the documents' claims:", "\n".join(lines)]


def _overview(sections: list[Section]) -> str:
    head = ("experiment", "documents' claims", "bounds of our own", "seeds", "marked")
    cells = [head, ("---",) * len(head)]
    for part in sections:
        marks = "; ".join(part.marks)
        cells.append(
            (
                f"[{part.name}](#{_anchor(part)})",
                _in_words(part.counts),
                _in_words(part.our_counts),
                # Some experiments have seeds of their own in each run.
                str(max(part.groups[0].num_runs, *(row.count for row in part.rows), 0)),
                marks,
            )
        )
    return _lines(cells)


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in JUDGED if counts[verdict]) or "–"


def _anchor(part: Section) -> str:
    """A place of its own, as what a site makes of a title is its own affair."""
    return f"experiment-{part.name}"


def _section(part: Section, picture: Path | None) -> str:
    shown, *others = part.groups
    parts = [
        f'<a id="{_anchor(part)}"></a>',
        f"## {part.title}",
        f"{part.source}. `{part.command}`: {_facts(shown)}.",
    ]
    if part.marks:
        parts.append(f"**To be taken with care**: {'; '.join(part.marks)}.")
    parts += _tables(part.rows)
    for group in others:
        measured = [row for row in group.rows if row.count]
        if measured:
            commands = ", ".join(f"`{command}`" for command in group.commands)
            marks = f" ({'; '.join(group.marks)})" if group.marks else ""
            parts.append(f"Also run: {commands}: {_facts(group)}{marks}.")
            parts += _tables(measured, judged=False)
    if picture is not None:
        titles = "; ".join(figure.title for figure in part.figures)
        parts.append(f"![{titles.replace('[', '(').replace(']', ')')}]({picture.as_posix()})")
        if part.drawn:
            parts.append(part.drawn)
    parts += part.notes
    if part.tries:
        parts.append(_tries(part.tries))
    return "\n\n".join(parts)


def _tries(tries: list[Group]) -> str:
    """Earlier full-size runs, folded away."""
    parts = [f'<details markdown="1"><summary>Earlier tries: {len(tries)}</summary>']
    for group in tries:
        commands = ", ".join(f"`{command}`" for command in group.commands)
        parts += [
            f"{commands or 'Run'}: {_facts(group)}. {'; '.join(group.marks)}".strip(),
            *_tables([row for row in group.rows if row.count], judged=False),
        ]
    return "\n\n".join([*parts, "</details>"])


def _facts(group: Group) -> str:
    seeds = f"seeds {group.seeds}" if group.num_runs > 1 else f"one seed, {group.seeds}"
    size = "" if group.size == "full" else f"{group.size} size"
    cpu = f"CPU time from scratch {group.cpu}" if group.cpu else group.duration
    return ", ".join(filter(None, [size, group.epochs, seeds, cpu]))


def _tables(rows: list[Row], *, judged: bool = True) -> list[str]:
    """The claims of documents, and our own bounds in a table of their own."""
    parts = []
    theirs, ours = ([row for row in rows if row.is_ours is own] for own in (False, True))
    for names, found in ((("document", "says"), theirs), (("why", "our bound"), ours)):
        if found:
            head = ["claim", *names, "measured", "confirmed if", *(["verdict"] if judged else [])]
            cells = [tuple(head), ("---",) * len(head)]
            cells += [
                (
                    row.label,
                    row.source.removeprefix(OURS).removeprefix(": "),
                    row.claimed,
                    row.ours,
                    row.rule,
                    *([row.verdict] if judged else []),
                )
                for row in found
            ]
            parts.append(_lines(cells))
    return parts


def _missing(missing: Mapping[str, Sequence[tuple[str, str, str]]]) -> list[str]:
    parts = []
    for document, items in missing.items():
        lines = [f"- {place}: {what} ({why})." for place, what, why in items]
        parts.append("\n".join([f"**{document}**", "", *lines]))
    return parts


def _lines(cells: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in cells)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
