"""The tables of the report as Markdown, for the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zeromean.report.page import Group, Row, Section
from zeromean.report.verdicts import RULE

NOT_REPRODUCED = (
    "Of the variance-networks paper, these are not reproduced: Table 1 and Table 2 on CIFAR (VGG), "
    "and Figure 7 (adversarial examples)."
)


def to_markdown(
    sections: list[Section], figures: str, pictures: Mapping[str, Path] | None = None
) -> str:
    """A page with every claim that has been measured.

    Args:
        figures: A sentence that says where figures to look closer at are.
        pictures: Files of pictures by experiment.
    """
    pictures = pictures or {}
    run = [part for part in sections if part.groups]
    waiting = [part for part in sections if not part.groups]
    parts = [
        "# Results",
        "<!-- Written by `zeromean report --markdown`; changes are lost. -->",
        f"Tables and figures of the papers, ours beside theirs. {figures}",
        NOT_REPRODUCED,
        RULE,
        *(_section(part, pictures.get(part.name)) for part in run),
    ]
    if waiting:
        names = ", ".join(f"`{part.name}`" for part in waiting)
        parts += ["## Not run at full size yet", f"{names}."]
    return "\n\n".join(parts) + "\n"


def _section(part: Section, picture: Path | None) -> str:
    shown, *others = part.groups
    parts = [f"## {part.title}", f"{part.source}. `{part.command}`: {_facts(shown)}."]
    parts.append(_table(part.rows))
    for group in others:
        measured = [row for row in group.rows if row.count]
        if measured:
            commands = ", ".join(f"`{command}`" for command in group.commands)
            parts += [f"Also run: {commands}: {_facts(group)}.", _table(measured)]
    if picture is not None:
        titles = "; ".join(figure.title for figure in part.figures)
        parts.append(f"![{titles.replace('[', '(').replace(']', ')')}]({picture.as_posix()})")
    return "\n\n".join([*parts, *part.notes])


def _facts(group: Group) -> str:
    seeds = f"seeds {group.seeds}" if group.num_runs > 1 else f"one seed, {group.seeds}"
    return ", ".join([*filter(None, [group.epochs]), seeds, group.duration])


def _table(rows: list[Row]) -> str:
    cells = [
        ("claim", "paper", "ours", "confirmed if", "verdict"),
        ("---", "---", "---", "---", "---"),
        *((row.label, row.paper, row.ours, row.rule, row.verdict) for row in rows),
    ]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in cells)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
