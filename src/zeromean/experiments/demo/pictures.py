"""The pictures of the demo, drawn on Figure objects: no display, no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from zeromean.data.built_in import TOY_CENTRES
from zeromean.experiments.demo.digits import Accuracies, separation
from zeromean.experiments.demo.toy import Encoding
from zeromean.files.atomic import whole_file
from zeromean.prediction.classification import PredictiveUncertainty

# Colours that colour-blind readers tell apart (Okabe and Ito).
NETWORK_COLOURS = {"deterministic": "#7f7f7f", "dropout": "#0072B2", "variance": "#D55E00"}
CLASS_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
IMAGE_COLOURS = ("#333333", "#009E73", "#E69F00", "#CC79A7")
GRID = "#e5e5e5"
DPI = 150


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG that appears under its name only when it is complete."""
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI)
    return path


def draw_accuracy(accuracies: Mapping[str, Accuracies]) -> Figure:
    """Three ways to predict side by side, and accuracy against the number of samples."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _title(bars, "Propagating means leaves a variance network at chance")
    bars.set(ylabel="test accuracy, %", ylim=(0, 108), yticks=range(0, 101, 20))
    bars.set_xticks(range(3), ["one sample", "mean propagation", "20 samples"])
    bars.tick_params(axis="x", length=0)
    _title(curves, "Accuracy against the number of samples")
    curves.set(xlabel="samples averaged", ylabel="test accuracy, %", xscale="log")
    curves.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    curves.set_xticks([], minor=True)
    curves.grid(axis="y", color=GRID)
    for i, (name, result) in enumerate(accuracies.items()):
        colour = NETWORK_COLOURS[name]
        places = np.arange(3) + 0.28 * (i - 1)
        heights = [
            float(result.one_sample.mean()),
            result.mean,
            float(result.twenty_samples.mean()),
        ]
        drawn = bars.bar(places, heights, 0.26, color=colour)
        bars.bar_label(drawn, fmt="%.1f", fontsize=8, padding=2)
        curve = result.by_num_samples.numpy()
        mean, std = curve.mean(0), curve.std(0, ddof=1)
        steps = range(1, len(mean) + 1)
        curves.plot(steps, mean, color=colour, linewidth=2, label=name)
        curves.fill_between(steps, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_uncertainty(
    images: Mapping[str, Tensor], uncertainties: Mapping[str, PredictiveUncertainty]
) -> Figure:
    """A row for each kind of image, the familiar one first: examples, and two uncertainties."""
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    rows = figure.subplots(len(images), 3, sharex="col", width_ratios=(1, 1.4, 1.4))
    for row, (name, pictures), colour in zip(rows, images.items(), IMAGE_COLOURS, strict=True):
        _draw_examples(row[0], pictures)
        row[0].set_title(name, color=colour, fontsize=10, fontweight="bold")
    measures = {
        "predictive_entropy": "predictive entropy, nats",
        "mutual_information": "mutual information, nats",
    }
    for column, (measure, label) in zip(rows.T[1:], measures.items(), strict=True):
        values = [getattr(uncertainty, measure) for uncertainty in uncertainties.values()]
        _draw_histograms(column, values)
        column[-1].set_xlabel(label)
    figure.suptitle(
        "How unsure the variance network is of what it has never seen", fontweight="bold"
    )
    return figure


def draw_toy(encodings: Sequence[Encoding]) -> Figure:
    """Activations of the two variance neurons, next to the standard deviations that they encode."""
    figure = Figure(figsize=(10, 0.6 + 4.2 * len(encodings)), layout="constrained")
    rows = figure.subplots(len(encodings), 2, squeeze=False, width_ratios=(1.2, 1))
    for number, ((left, right), encoding) in enumerate(zip(rows, encodings, strict=True), 1):
        _title(left, f"Network {number}: one sample for each point")
        _title(right, "What is learned: the spread of each class")
        _draw_activations(left, encoding)
        _draw_std(right, encoding)
    handles, labels = rows[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_examples(panel: Axes, images: Tensor) -> None:
    for i, image in enumerate(images[:4, 0]):
        panel.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=1, extent=(9 * i, 9 * i + 8, 0, 8))
    panel.set(xlim=(-0.5, 35.5), ylim=(-0.5, 8.5))
    panel.set_axis_off()


def _draw_histograms(panels: Sequence[Axes], values: Sequence[Tensor]) -> None:
    """One histogram a panel, with the bound that 95% of the first, familiar kind lie below."""
    familiar, bound = values[0], float(values[0].quantile(0.95))
    highest = max(float(value.max()) for value in values)
    for panel, value, colour in zip(panels, values, IMAGE_COLOURS, strict=True):
        panel.hist(value.numpy(), 40, range=(0, highest), color=colour)
        panel.axvline(bound, color="black", linestyle="--", linewidth=1)
        note = "95% of the test digits\nare left of the line"
        if value is not familiar:
            beyond = (value > bound).float().mean()
            note = f"{beyond:.0%} right of it\nAUROC {separation(familiar, value):.3f}"
        panel.text(0.98, 0.92, note, transform=panel.transAxes, ha="right", va="top", fontsize=9)
        panel.set_ylim(top=1.35 * panel.get_ylim()[1])
        panel.set_yticks([])
        panel.spines[["top", "right", "left"]].set_visible(False)


def _draw_activations(panel: Axes, encoding: Encoding) -> None:
    for c, colour in enumerate(CLASS_COLOURS):
        x, y = encoding.activations[encoding.labels == c].T.numpy()
        panel.scatter(x, y, s=9, color=colour, alpha=0.5, linewidths=0)
    # The spreads differ by orders of magnitude, on both sides of zero.
    panel.set_xscale("symlog", linthresh=0.1)
    panel.set_yscale("symlog", linthresh=0.1)
    ticks = (-1e3, -1e1, 0, 1e1, 1e3)
    panel.set(xticks=ticks, xlabel="variance neuron 1, signed log scale")
    panel.set(yticks=ticks, ylabel="variance neuron 2, signed log scale")
    panel.text(
        0.5,
        0.98,
        f"accuracy: {encoding.one_sample:.1f}% by one sample, {encoding.twenty_samples:.1f}% by 20",
        transform=panel.transAxes,
        ha="center",
        va="top",
        fontsize=9,
    )


def _draw_std(panel: Axes, encoding: Encoding) -> None:
    for c, (colour, (x, y)) in enumerate(zip(CLASS_COLOURS, TOY_CENTRES, strict=True)):
        name = f"class at ({x:.0f}, {y:.0f})"
        panel.plot(
            encoding.std[c].numpy(), "o-", color=colour, markersize=10, linewidth=2, label=name
        )
    panel.set(ylabel="standard deviation (median over points)", yscale="log", xlim=(-0.35, 1.35))
    panel.set_xticks(range(2), ["variance neuron 1", "variance neuron 2"])
    panel.grid(axis="y", color=GRID)


def _title(panel: Axes, text: str) -> None:
    panel.set_title(text, loc="left", fontsize=11, fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)
