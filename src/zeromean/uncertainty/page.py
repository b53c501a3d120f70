"""One HTML file that needs no other: a table, figures, and what they mean."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from zeromean.files.atomic import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .9rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } td { border-top: 1px solid #e5e5e5; }
.wide { overflow-x: auto; }
.figures { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; }
figcaption { font-weight: 600; max-width: 28rem; } img { max-width: 100%; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.2rem; }
"""


def write_page(
    path: str | os.PathLike[str],
    rows: Sequence[Sequence[str]],
    figures: Mapping[str, Figure],
    meanings: Mapping[str, str],
) -> None:
    """Write the page, whole or not at all.

    Args:
        rows: The table, its header first.
        figures: By their titles.
        meanings: What the words of the table mean.
    """
    header, *body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    table = "\n".join(f"<tr>{row}</tr>" for row in body)
    pictures = "\n".join(
        f'<figure><figcaption>{escape(title)}</figcaption><img alt="{escape(title)}" '
        f'src="data:image/svg+xml;base64,{_svg(figure)}"></figure>'
        for title, figure in figures.items()
    )
    words = "\n".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in meanings.items())
    head = header.replace("<td>", "<th>").replace("</td>", "</th>")
    text = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Uncertainty</title>
<style>{_STYLE}</style>
<h1>Uncertainty</h1>
<div class="wide"><table>
<tr>{head}</tr>
{table}
</table></div>
<h2>Pictures</h2>
<div class="figures">
{pictures}
</div>
<h2>What they mean</h2>
<dl>
{words}
</dl>
</html>
"""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _svg(figure: Figure) -> str:
    import matplotlib

    drawn = io.BytesIO()
    # Without a date and random names, so that the same numbers make the same file.
    with matplotlib.rc_context({"svg.hashsalt": "zeromean"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return base64.b64encode(drawn.getvalue()).decode("ascii")
