"""Histograms: in a line of text, and as pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zeromean.files.atomic import whole_file

_BLOCKS = " ▁▂▃▄▅▆▇█"
_BLUE = "#3b6ea5"


def in_text(values: np.ndarray, low: float, high: float, bins: int = 16) -> str:
    """A bar of blocks; what lies beyond the ends is counted in the first or the last."""
    counts, _ = np.histogram(np.clip(values, low, high), bins, (low, high))
    largest = max(int(counts.max()), 1)
    # What is there at all is seen.
    heights = np.ceil(counts / largest * (len(_BLOCKS) - 1)).astype(int)
    return "".join(_BLOCKS[height] for height in heights)


def draw(
    path: Path, by_layer: Mapping[str, np.ndarray], label: str, marked: Mapping[str, float]
) -> None:
    """One histogram a layer, all over the same range, into a PNG.

    Args:
        label: What the numbers are.
        marked: Vertical lines, and what they mean.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(by_layer))
    rows = math.ceil(len(by_layer) / columns)
    figure = Figure(figsize=(3.4 * columns + 0.6, 1.9 * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    everything = np.concatenate([values[np.isfinite(values)] for values in by_layer.values()])
    # The few that are far out would leave no room for the others.
    low, high = np.quantile(everything, [0.001, 0.999]) if len(everything) else (0.0, 1.0)
    margin = 0.03 * (high - low) or 0.5
    most = max(map(len, by_layer.values()))
    bins = min(60, max(12, 2 * math.isqrt(most)))
    edges = np.linspace(low - margin, high + margin, bins + 1)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for axis, (name, values) in zip(axes.flat, by_layer.items(), strict=False):
        axis.hist(np.clip(values, edges[0], edges[-1]), edges, color=_BLUE)
        axis.set_title(f"{name} ({len(values):,})", fontsize=9)
        axis.set_yticks([])
        axis.spines[["left", "top", "right"]].set_visible(False)
        for place in marked.values():
            if edges[0] < place < edges[-1]:
                axis.axvline(place, color="black", linewidth=0.8, linestyle="--")
    for axis in list(axes.flat)[len(by_layer) :]:
        axis.set_visible(False)
    for column in range(columns):  # The last one of each column has the numbers below it.
        last = max(r for r in range(rows) if r * columns + column < len(by_layer))
        axes[last, column].tick_params(labelbottom=True)
        axes[last, column].set_xlabel(label, fontsize=9)
    if marked:
        figure.suptitle("; ".join(f"dashed: {meaning}" for meaning in marked), fontsize=9)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
