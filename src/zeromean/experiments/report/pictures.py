"""The figures of a record as one still picture, for the documentation."""

from __future__ import annotations

import math
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogFormatter

from zeromean.experiments.report.records import Figure, Trace
from zeromean.files.atomic import whole_file

# Colours that colour-blind readers tell apart (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7f7f7f", "#000000")
DASHES = ("-", "--", ":", "-.", (0, (6, 2)))
MARKERS = "osD^X"
MANY = 25
NUM_BINS = 40
COLUMNS = 2
INCHES = 4.4, 3.3
LETTERS = 48
MANY_NAMES = 5
DPI = 90


def save(figures: list[Figure], path: Path) -> Path:
    """Draw figures side by side into a PNG."""
    columns = min(COLUMNS, len(figures))
    rows = math.ceil(len(figures) / columns)
    canvas = Canvas(figsize=(columns * INCHES[0], rows * INCHES[1]), layout="constrained")
    places = canvas.subplots(rows, columns, squeeze=False).flatten()
    for place, figure in zip(places, figures, strict=False):
        _draw(place, figure)
    for place in places[len(figures) :]:
        place.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        canvas.savefig(temporary, format="png", dpi=DPI)
    return path


def _draw(axes: Axes, figure: Figure) -> None:
    axes.set_title(textwrap.fill(figure.title, LETTERS), loc="left", fontsize="medium")
    axes.set_xlabel(textwrap.fill(figure.x_label, LETTERS), fontsize="small")
    axes.set_ylabel(textwrap.fill(figure.y_label, LETTERS), fontsize="small")
    axes.tick_params(which="both", labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    if any(trace.kind == "image" for trace in figure.traces):
        _draw_image(axes, figure.traces[0])
        return
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    _draw_bars(axes, [trace for trace in figure.traces if trace.kind == "bar"])
    _draw_histograms(axes, [trace for trace in figure.traces if trace.kind == "histogram"])
    for index, trace in enumerate(figure.traces):
        if trace.kind in ("line", "scatter"):
            _draw_points(axes, trace, index)
    if figure.x_log:
        axes.set_xscale("log")
    if figure.y_log:
        axes.set_yscale("log")
    if len(figure.traces) > 1:
        if any(trace.kind == "bar" for trace in figure.traces):
            axes.margins(y=0.1 + 0.08 * len(figure.traces))  # Room for the legend.
        columns = max(1, LETTERS // (max(len(trace.name) for trace in figure.traces) + 5))
        if MANY_NAMES < len(figure.traces) <= 4 * columns:
            # Below, where it hides nothing, if that takes four lines at most.
            place: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.3), "frameon": False}
            axes.legend(fontsize="x-small", ncols=columns, **place)
        else:
            many = len(figure.traces) > MANY_NAMES
            axes.legend(fontsize="xx-small" if many else "x-small", framealpha=0.8)
    for axis in [axes.xaxis] * figure.x_log + [axes.yaxis] * figure.y_log:
        low, high = axis.get_view_interval()
        if high < 100 * low:  # Few powers of ten: 2 and 3 rather than 2 × 10⁰ and 3 × 10⁰.
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _draw_points(axes: Axes, trace: Trace, index: int) -> None:
    y, error = _numbers(trace.y), _numbers(trace.error)
    x: Any = trace.x if any(isinstance(each, str) for each in trace.x) else _numbers(trace.x)
    look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "label": trace.name}
    if trace.kind == "scatter":
        many = len(y) > 200
        look |= {"linestyle": "", "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
        axes.plot(x, y, **look | ({"markersize": 2, "alpha": 0.5} if many else {}))
        return
    look |= {"linestyle": DASHES[index // 2 % len(DASHES)], "linewidth": 1.6}
    if len(y) <= MANY:
        look |= {"marker": MARKERS[index % len(MARKERS)], "markersize": 4}
    if len(error) and len(y) <= MANY:
        axes.errorbar(x, y, error, capsize=2, **look)
        return
    axes.plot(x, y, **look)
    if len(error):
        axes.fill_between(x, y - error, y + error, color=look["color"], alpha=0.15, linewidth=0)


def _draw_bars(axes: Axes, traces: list[Trace]) -> None:
    if not traces:
        return
    labels = list(dict.fromkeys(x for trace in traces for x in trace.x))
    width = 0.8 / len(traces)
    for index, trace in enumerate(traces):
        shift = (index - (len(traces) - 1) / 2) * width
        x = [labels.index(each) + shift for each in trace.x]
        look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "label": trace.name}
        error = _numbers(trace.error) if trace.error else None
        axes.bar(x, _numbers(trace.y), width, yerr=error, capsize=2, **look)
    words = [str(label) for label in labels]
    long = len(words) * max(map(len, words)) > 45
    axes.set_xticks(range(len(words)), words, rotation=30 if long else 0)
    for text in axes.get_xticklabels() if long else ():
        text.set(ha="right", rotation_mode="anchor", fontsize="x-small")


def _draw_histograms(axes: Axes, traces: list[Trace]) -> None:
    values = [_numbers(trace.x) for trace in traces]
    edges: Any = None
    if values and not traces[0].y:
        edges = np.histogram_bin_edges(np.concatenate(values), NUM_BINS)
    for index, (trace, x) in enumerate(zip(traces, values, strict=True)):
        look: dict[str, Any] = {"color": COLOURS[index], "label": trace.name, "alpha": 0.6}
        if trace.y:
            width = min((right - left for left, right in pairwise(sorted(x)) if right > left))
            axes.bar(x, _numbers(trace.y), width, **look)
        else:
            axes.hist(x, edges, **look)


def _draw_image(axes: Axes, trace: Trace) -> None:
    pixels = np.array(trace.rows, dtype=float)
    largest = np.nanmax(np.abs(pixels)) or 1.0
    axes.imshow(pixels, cmap="RdBu", vmin=-largest, vmax=largest, interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def _numbers(values: Any) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=float)
