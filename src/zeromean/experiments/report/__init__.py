"""`zeromean report`: one web page that puts the documents' numbers next to ours.

The page is a function of the records (`records.py`) and of nothing else: no clock, no machine, no
network. `verdicts.py` says when a claim is confirmed, `figures.py` what a figure looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zeromean.experiments.report import verdicts
from zeromean.experiments.report.counts import count_verdicts
from zeromean.experiments.report.markdown import to_markdown
from zeromean.experiments.report.page import Section, section
from zeromean.experiments.report.records import Record, read_records
from zeromean.experiments.report.verdicts import RULE
from zeromean.experiments.runs.damage import damage_of, refuse
from zeromean.extras import how_to_install
from zeromean.files.atomic import whole_file

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Registry:
    """What there is to report on, run or not.

    Attributes:
        titles: Title by name of every experiment there is. They come in this order, and those that
            have no record say "not run".
        versions: Version by name; runs of an older one are stale.
        missing: What no experiment covers, by document: place, what it shows, why not.
        covers: What an experiment is about, by its name: document, place, what it shows. Where
            none of those about it has runs of full size, it is not reproduced either.
    """

    titles: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, Sequence[tuple[str, str, str]]] = field(default_factory=dict)
    covers: Mapping[str, Sequence[tuple[str, str, str]]] = field(default_factory=dict)


def build(
    records: Path | Mapping[str, Record],
    output: Path,
    known: Registry | Mapping[str, str] = Registry(),
    on_damage: Callable[[str], object] = refuse,
) -> Path:
    """Write the page of some records, whole or not at all, and return its path.

    Args:
        records: A folder with one JSON file an experiment, or the records by name.
        output: The HTML file; its folder is made where there is none.
        known: What there is to report on, or the titles alone.
        on_damage: Gets a sentence for every record that cannot be read, which is left out; the
            default raises a ValueError at the first.

    Raises:
        ValueError: A record cannot be read; the message names the file and the key.
        ImportError: jinja2 or plotly is not installed.
    """
    output, known = Path(output), _registry(known)
    html = _render(_sections(_found(records, on_damage), known, on_damage), known)
    output.parent.mkdir(parents=True, exist_ok=True)
    _write(output, html)
    return output


def build_markdown(
    records: Path | Mapping[str, Record],
    output: Path,
    known: Registry | Mapping[str, str] = Registry(),
    *,
    figures: str = "",
    on_damage: Callable[[str], object] = refuse,
) -> Path:
    """Write the same as Markdown, with still pictures in the folder `images` next to it.

    Args:
        figures: A sentence that says where figures to look closer at are.
    """
    from zeromean.experiments.report import pictures

    output, known = Path(output), _registry(known)
    found = _found(records, on_damage)
    drawn = {
        name: Path("images", f"{name}.png") for name, record in found.items() if record.figures
    }
    sections = _sections(found, known, on_damage)
    text = to_markdown(sections, figures, drawn, _missing(sections, known))
    output.parent.mkdir(parents=True, exist_ok=True)
    for name, picture in drawn.items():
        pictures.save(found[name].figures, output.parent / picture)
    _write(output, text)
    return output


def _registry(known: Registry | Mapping[str, str]) -> Registry:
    return known if isinstance(known, Registry) else Registry(titles=known)


def _found(
    records: Path | Mapping[str, Record], on_damage: Callable[[str], object]
) -> Mapping[str, Record]:
    return records if isinstance(records, Mapping) else read_records(Path(records), on_damage)


def _sections(
    found: Mapping[str, Record], known: Registry, on_damage: Callable[[str], object]
) -> list[Section]:
    rest = sorted(found.keys() - known.titles.keys(), key=_natural)
    sections = []
    for name in [*known.titles, *rest]:
        with damage_of(Path(f"{name}.json"), on_damage):
            title, version = known.titles.get(name, ""), known.versions.get(name)
            sections.append(section(name, title, found.get(name), version=version))
    return sections


def _missing(sections: list[Section], known: Registry) -> dict[str, list[tuple[str, str, str]]]:
    """What is not reproduced: no experiment covers it, or none has been run at full size."""
    full = {part.name for part in sections if part.groups and part.groups[0].size == "full"}
    about: dict[tuple[str, str, str], list[str]] = {}
    for name, items in known.covers.items():
        for item in items:
            about.setdefault(item, []).append(name)
    missing = {document: list(items) for document, items in known.missing.items()}
    for (document, place, what), names in about.items():
        if not full & {*names}:
            several, listed = len(names) > 1, ", ".join(f"`{name}`" for name in names)
            why = f"the experiment{'s' if several else ''} {listed} {'have' if several else 'has'}"
            why += " not been run at full size"
            missing.setdefault(document, []).append((place, what, why))
    return missing


def _render(sections: list[Section], known: Registry) -> str:
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            how_to_install(f"The report needs jinja2 and plotly ({error})", "experiments")
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        sections=sections,
        rule=RULE,
        counts=count_verdicts(sections),
        verdicts=verdicts.JUDGED,
        missing=_missing(sections, known),
        figures=_json_for_script([figure.plot for part in sections for figure in part.figures]),
        style=(_HERE / "page.css").read_text("utf-8"),
        script=(_HERE / "page.js").read_text("utf-8"),
        plotly=get_plotlyjs(),
    )


def _json_for_script(value: object) -> str:
    """JSON for a script element, which no text inside the JSON can end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _write(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, "utf-8", errors="replace", newline="\n")


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorts fig10 after fig2."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name)]
