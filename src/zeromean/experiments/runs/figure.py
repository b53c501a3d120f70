"""Plain descriptions of figures, as the report draws them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def figure(
    title: str,
    x_label: str,
    y_label: str,
    traces: Iterable[Mapping[str, Any]],
    *,
    x_log: bool = False,
    y_log: bool = False,
) -> dict[str, Any]:
    return {
        "title": title,
        "x_label": x_label,
        "y_label": y_label,
        "x_log": x_log,
        "y_log": y_log,
        "traces": list(traces),
    }


def trace(
    name: str,
    x: Sequence[Any],
    y: Sequence[Any],
    *,
    kind: str = "line",
    error: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """One series; `kind` is "line", "bar" or "scatter"."""
    series = {"name": name, "x": list(x), "y": list(y), "kind": kind}
    return series if error is None else {**series, "error": list(error)}


def histogram(name: str, values: Sequence[float]) -> dict[str, Any]:
    """A series of values, for the report to count."""
    return {"name": name, "x": list(values), "kind": "histogram"}


def image(
    title: str, x_label: str, y_label: str, rows: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """A figure of pixels, the first row on top; zero is the background."""
    pixels = {"name": title, "kind": "image", "rows": [list(row) for row in rows]}
    return figure(title, x_label, y_label, [pixels])


def over_seeds(
    name: str, x: Sequence[Any], curves: Sequence[Sequence[float | None]], *, kind: str = "line"
) -> dict[str, Any]:
    """The mean of a curve over seeds, with its standard error where there are several."""
    columns = [
        [v for v in column if v is not None and not math.isnan(v)]
        for column in zip(*curves, strict=True)
    ]
    means = [statistics.fmean(column) if column else None for column in columns]
    if len(curves) < 2:
        return trace(name, x, means, kind=kind)
    errors = [
        statistics.stdev(column) / len(column) ** 0.5 if len(column) > 1 else 0.0
        for column in columns
    ]
    return trace(name, x, means, kind=kind, error=errors)


def bars(
    title: str,
    x_label: str,
    labels: Mapping[str, str],
    results: Sequence[Mapping[str, Mapping[str, Any]]],
    *,
    y_label: str = "accuracy, %",
) -> dict[str, Any]:
    """A group of bars for every variant, from the metrics of each seed: results[seed][variant]."""
    variants = list(results[0])
    traces = [
        over_seeds(
            label, variants, [[seed[v][key] for v in variants] for seed in results], kind="bar"
        )
        for key, label in labels.items()
    ]
    return figure(title, x_label, y_label, traces)
