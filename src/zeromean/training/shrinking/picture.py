"""The curve of trade-offs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zeromean.extras import how_to_install
from zeromean.files.atomic import whole_file

if TYPE_CHECKING:
    from zeromean.training.shrinking.result import Shrunk

_BLUE, _RED = "#3b6ea5", "#c44e52"


def draw(shrunk: Shrunk, path: Path) -> None:
    """Score against time and against bytes, the network that is taken in red, into a PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
    except ImportError as error:
        raise ImportError(how_to_install("A picture needs matplotlib", "cli")) from error
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    scores = [network.score for network in shrunk.networks]
    measures = {
        f"ms, {shrunk.key}": [n.milliseconds[shrunk.key] for n in shrunk.networks],
        "bytes of the file": [n.file_size for n in shrunk.networks],
    }
    for axis, (label, values) in zip(
        figure.subplots(1, 2, sharey=True), measures.items(), strict=True
    ):
        ordered = sorted(zip(values, scores, strict=True))
        axis.plot(*zip(*ordered, strict=True), color=_BLUE, marker="o", markersize=4, linewidth=1)
        chosen = values[shrunk.chosen], scores[shrunk.chosen]
        axis.plot(*chosen, color=_RED, marker="o", markersize=8, linestyle="none")
        for place in {0, shrunk.chosen}:
            axis.annotate(
                shrunk.networks[place].name,
                (values[place], scores[place]),
                textcoords="offset points",
                xytext=(0, 8),
                ha="center",
                fontsize=8,
            )
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.tick_params(labelsize=8)
        axis.set_xlabel(label, fontsize=9)
        axis.margins(0.15, 0.25)
        axis.spines[["top", "right"]].set_visible(False)
    score = "−NLL" if shrunk.likelihood else "accuracy, %"
    figure.axes[0].set_ylabel(f"{score}, validation data", fontsize=9)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
