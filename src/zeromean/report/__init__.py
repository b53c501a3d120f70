"""`zeromean report`: one web page that puts the papers' numbers beside ours.

The page is a function of the records (`records.py`) and of nothing else: no clock, no machine, no
network. `verdicts.py` says when a claim is confirmed, `figures.py` what a figure looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from zeromean.report.markdown import to_markdown
from zeromean.report.page import Section, count_verdicts, section
from zeromean.report.records import read_records
from zeromean.report.verdicts import RULE
from zeromean.whole_file import whole_file

_HERE = Path(__file__).parent


def build(records: Path, output: Path, known: Mapping[str, str] | None = None) -> Path:
    """Write the page of the records in a folder, whole or not at all, and return its path.

    Args:
        records: A folder with one JSON file an experiment.
        output: The HTML file; its folder is made where there is none.
        known: Title by name of every experiment there is. They come in this order, and those that
            have no record say "not run".

    Raises:
        ValueError: A record cannot be read; the message names the file and the key.
        ImportError: jinja2 or plotly is not installed.
    """
    records, output = Path(records), Path(output)
    html = _render(_sections(records, known or {}))
    output.parent.mkdir(parents=True, exist_ok=True)
    _write(output, html)
    return output


def build_markdown(
    records: Path, output: Path, known: Mapping[str, str] | None = None, *, figures: str = ""
) -> Path:
    """Write the same as Markdown, with still pictures in the folder `images` beside it.

    Args:
        figures: A sentence that says where figures to look closer at are.
    """
    from zeromean.report import pictures

    output = Path(output)
    found = read_records(Path(records))
    drawn = {
        name: Path("images", f"{name}.png") for name, record in found.items() if record.figures
    }
    text = to_markdown(_sections(Path(records), known or {}), figures, drawn)
    output.parent.mkdir(parents=True, exist_ok=True)
    for name, picture in drawn.items():
        pictures.save(found[name].figures, output.parent / picture)
    _write(output, text)
    return output


def _sections(folder: Path, known: Mapping[str, str]) -> list[Section]:
    found = read_records(folder)
    rest = sorted(found.keys() - known.keys(), key=_natural)
    return [section(name, known.get(name, ""), found.get(name)) for name in [*known, *rest]]


def _render(sections: list[Section]) -> str:
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            f"The report needs jinja2 and plotly ({error}): pip install 'zeromean[experiments]'"
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
        figures=_json_for_script([figure.plot for part in sections for figure in part.figures]),
        style=(_HERE / "page.css").read_text("utf-8"),
        script=(_HERE / "page.js").read_text("utf-8"),
        plotly=get_plotlyjs(),
    )


def _json_for_script(value: object) -> str:
    """JSON that no text inside can end the script element of."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _write(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, "utf-8", newline="\n")


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorts fig10 after fig2."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name)]
