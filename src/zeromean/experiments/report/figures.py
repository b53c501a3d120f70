"""A figure of a record as plotly draws it; colours are the page's (`page.js`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Any

from zeromean.experiments.report.formats import format_number
from zeromean.experiments.report.records import Figure, Trace

_MANY = 25
"""Points from which on error bars would hide the line: a band is drawn instead."""
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
_KIND_NAMES = {"line": "line", "bar": "bars", "scatter": "points", "histogram": "histogram"}
_PIXELS = {"showticklabels": False, "showgrid": False, "zeroline": False, "constrain": "domain"}


def plot(figure: Figure) -> dict[str, Any]:
    """Traces and axes in plotly's JSON; `meta.series` is the number of the colour.

    `errors` is next to them, for the table of the numbers: a band no longer shows them.
    """
    if any(trace.kind == "image" for trace in figure.traces):
        return _plot_image(figure)
    data = [
        part
        for index, trace in enumerate(figure.traces)
        for part in _plot_trace(trace, index, figure.y_log)
    ]
    traces = figure.traces
    histograms = any(trace.kind == "histogram" for trace in traces)
    layout = {
        "xaxis": _axis(figure.x_label, figure.x_log, chain(*(each.x for each in traces))),
        "yaxis": _axis(figure.y_label, figure.y_log, chain(*(each.y for each in traces))),
        "barmode": "overlay" if histograms else "group",
        "bargap": 0.02 if histograms else 0.25,
        "showlegend": len(traces) > 1,
    }
    errors = [trace.error for trace in traces]
    return {"data": data, "layout": layout, "errors": errors if any(errors) else None}


def describe(figure: Figure) -> str:
    """The figure in words, for those who do not see it."""
    if any(trace.kind == "image" for trace in figure.traces):
        return f"Image: {figure.title}."
    axes = f"{figure.y_label} against {figure.x_label}"
    scales = " and ".join(axis for axis, log in (("x", figure.x_log), ("y", figure.y_log)) if log)
    scale = f", logarithmic in {scales}" if scales else ""
    series = "; ".join(_describe_trace(trace) for trace in figure.traces)
    return f"Chart: {axes}{scale}. {series or 'Nothing drawn'}."


def _plot_trace(trace: Trace, index: int, y_log: bool) -> list[dict[str, Any]]:
    common: dict[str, Any] = {
        "name": _escape(trace.name),
        "legendgroup": str(index),
        "meta": {"series": index},
        "x": [_escape(x) if isinstance(x, str) else x for x in trace.x],
    }
    if trace.kind == "histogram" and not trace.y:
        return [common | {"type": "histogram", "bingroup": "all", "opacity": 0.6}]
    common["y"] = trace.y
    if trace.kind == "histogram":
        return [common | {"type": "bar", "width": _bin_width(trace.x), "opacity": 0.6}]
    if trace.kind == "bar":
        return [common | {"type": "bar"} | _error_bars(trace)]
    if trace.kind == "scatter":
        marker = {"size": 5 if len(trace.x) > 200 else 8, "symbol": _SYMBOLS[index % 5]}
        faint = {"opacity": 0.6} if len(trace.x) > 200 else {}
        points = {"type": "scatter", "mode": "markers", "marker": marker}
        return [common | points | faint | _error_bars(trace)]
    line = common | {
        "type": "scatter",
        "mode": "lines" if len(trace.x) > _MANY else "lines+markers",
        "line": {"dash": _DASHES[index % 5], "width": 2},
        "marker": {"size": 6, "symbol": _SYMBOLS[index % 5]},
    }
    band = _band(trace, index, y_log)
    return [*band, line] if band else [line | _error_bars(trace)]


def _plot_image(figure: Figure) -> dict[str, Any]:
    """Pixels are square, the first row is on top, and zero has the colour of the page."""
    (image,) = figure.traces
    pixels = {"type": "heatmap", "z": image.rows, "zmid": 0, "showscale": False}
    layout = {
        "xaxis": _axis(figure.x_label, False, ()) | _PIXELS,
        "yaxis": _axis(figure.y_label, False, ())
        | _PIXELS
        | {"autorange": "reversed", "scaleanchor": "x"},
        "showlegend": False,
    }
    data = [pixels | {"name": _escape(image.name), "meta": {"series": 0, "image": True}}]
    return {"data": data, "layout": layout, "errors": None}


def _error_bars(trace: Trace) -> dict[str, Any]:
    if not trace.error:
        return {}
    return {"error_y": {"type": "data", "array": trace.error, "thickness": 1.2, "width": 3}}


def _band(trace: Trace, index: int, y_log: bool) -> list[dict[str, Any]]:
    """The outline of y ± error, where that is a region without holes."""
    if len(trace.x) <= _MANY or not trace.error or None in trace.x:
        return []
    pairs = zip(trace.y, trace.error, strict=True)
    spans = [(y - error, y + error) for y, error in pairs if y is not None and error is not None]
    if len(spans) < len(trace.y) or (y_log and min(low for low, _ in spans) <= 0):
        return []
    lower, upper = zip(*spans, strict=True)
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [*trace.x, *reversed(trace.x)],
            "y": [*upper, *reversed(lower)],
            "fill": "toself",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": False,
            "legendgroup": str(index),
            "meta": {"series": index, "band": True},
        }
    ]


def _bin_width(centres: list[float | str | None]) -> float | None:
    numbers = sorted(x for x in centres if isinstance(x, int | float))
    return min((right - left for left, right in pairwise(numbers) if right > left), default=None)


def _axis(label: str, log: bool, values: Iterable[float | str | None]) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": _escape(label)}}
    values = list(values)
    if any(isinstance(value, str) for value in values):
        return axis | {"type": "category"}
    if not log:
        return axis
    axis |= {"type": "log", "exponentformat": "power"}
    positive = [value for value in values if isinstance(value, int | float) and value > 0]
    decades = math.log10(max(positive) / min(positive)) if positive else 0
    # Plotly writes 2 and 5 between the powers of ten, which only a short axis has room for.
    return axis | {"dtick": math.ceil(decades / 8)} if decades > 1.5 else axis


def _describe_trace(trace: Trace) -> str:
    values = trace.y or [x for x in trace.x if not isinstance(x, str)]
    numbers = [value for value in values if value is not None]
    if not numbers:
        return f"{trace.name}: {_KIND_NAMES[trace.kind]}, no values"
    low, high = format_number(min(numbers)), format_number(max(numbers))
    return f"{trace.name}: {_KIND_NAMES[trace.kind]}, {len(values)} values from {low} to {high}"


def _escape(text: str) -> str:
    """Plotly reads its labels as a kind of HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
