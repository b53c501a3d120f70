"""The tables of the report as Markdown, for the documentation."""

from __future__ import annotations

from zeromean.report.page import Section
from zeromean.report.verdicts import RULE

NOT_REPRODUCED = (
    "Of the variance-networks paper, these are not reproduced: Table 1 and Table 2 on CIFAR (VGG), "
    "and Figure 7 (adversarial examples)."
)


def to_markdown(sections: list[Section], figures: str) -> str:
    """A page with every claim that has been measured; `figures` says where the rest is."""
    run = [part for part in sections if part.groups]
    waiting = [part for part in sections if not part.groups]
    parts = [
        "# Results",
        "<!-- Written by `zeromean report --markdown`; changes are lost. -->",
        f"Tables and figures of the papers, ours beside theirs. {figures}",
        NOT_REPRODUCED,
        RULE,
        *(_section(part) for part in run),
    ]
    if waiting:
        names = ", ".join(f"`{part.name}`" for part in waiting)
        parts += ["## Not run at full size yet", f"{names}."]
    return "\n\n".join(parts) + "\n"


def _section(part: Section) -> str:
    shown = part.groups[0]
    rows = [
        ("claim", "paper", "ours", "confirmed if", "verdict"),
        ("---", "---", "---", "---", "---"),
        *((row.label, row.paper, row.ours, row.rule, row.verdict) for row in part.rows),
    ]
    table = "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)
    seeds = f"seeds {shown.seeds}" if shown.num_runs > 1 else f"one seed, {shown.seeds}"
    facts = [*filter(None, [shown.epochs]), seeds, shown.duration]
    return "\n\n".join(
        [
            f"## {part.title}",
            f"{part.source}. `{part.command}`: {', '.join(facts)}.",
            table,
            *part.notes,
        ]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
