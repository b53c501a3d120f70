"""The tables of the report as Markdown, for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeromean.experiments.report.page import Group, Row, Section, count_verdicts
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
    parts = [
        "# Results",
        "<!-- Written by `zeromean report --markdown`; changes are lost. -->",
        f"Tables and figures of the documents, ours next to theirs. {figures}",
        RULE,
        _counted(sections),
        *(_section(part, pictures.get(part.name)) for part in run),
    ]
    if waiting:
        names = ", ".join(f"`{part.name}`" for part in waiting)
        parts += ["## Not run at full size yet", f"{names}."]
    if missing:
        parts += ["## Not reproduced", *_missing(missing)]
    return "\n\n".join(parts) + "\n"


def _counted(sections: list[Section]) -> str:
    counts = count_verdicts(sections)
    rows: list[tuple[str, Counter[str], int]] = [
        ("claims of the documents", counts.documents, counts.judged),
        ("bounds of our own", counts.ours, counts.ours_judged),
    ]
    cells = [("", "judged", *JUDGED), ("---",) * (2 + len(JUDGED))]
    cells += [
        (label, str(judged), *(str(counted[verdict]) for verdict in JUDGED))
        for label, counted, judged in rows
    ]
    text = _lines(cells)
    if counts.marked:
        text += (
            f"\n\n{counts.marked} of the {counts.judged} verdicts on documents come from records "
            "that are marked below: stale, without a clean commit, or with a seed that is missing."
        )
    return text


def _section(part: Section, picture: Path | None) -> str:
    shown, *others = part.groups
    parts = [f"## {part.title}", f"{part.source}. `{part.command}`: {_facts(shown)}."]
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
