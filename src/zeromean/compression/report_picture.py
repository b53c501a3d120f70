"""What compression has made of every layer, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zeromean.extras import how_to_install
from zeromean.files.atomic import whole_file

if TYPE_CHECKING:
    from zeromean.compression.report import CompressionReport

_GREY, _BLUE = "#c8c8c8", "#3b6ea5"


def draw(report: CompressionReport, path: Path) -> None:
    """A bar for each layer before and after, of its bytes and, if measured, of its time."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(how_to_install("A picture needs matplotlib", "cli")) from error
    rows = report.layers[::-1]
    values: dict[str, list[tuple[float, float]]] = {
        "kB": [(row.size_before / 1000, row.size_after / 1000) for row in rows]
    }
    if report.ms_before is not None:
        values["ms"] = [(row.ms_before or 0, row.ms_after or 0) for row in rows]
    height = 0.3 * len(rows) + 1.2
    figure = Figure(figsize=(4.2 * len(values) + 0.8, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(values), squeeze=False, sharey=True)[0]
    places = range(len(rows))
    for axis, (label, pairs) in zip(axes, values.items(), strict=True):
        axis.barh(places, [before for before, _ in pairs], 0.8, color=_GREY, label="before")
        axis.barh(places, [after for _, after in pairs], 0.45, color=_BLUE, label="after")
        axis.set_xlabel(label, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_yticks(places, [row.name for row in rows], fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].legend(fontsize=8, frameon=False)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
