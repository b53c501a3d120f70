"""Pictures of uncertainty, on Figure objects: no display, no global state. Extra `cli`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from zeromean.extras import how_to_install
from zeromean.uncertainty.arrays import ArrayLike, as_numbers, as_scores, require_count
from zeromean.uncertainty.calibration import Reliability
from zeromean.uncertainty.mixture import GaussianMixture, Interval
from zeromean.uncertainty.rejection import RiskCoverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that colour-blind readers tell apart (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7f7f7f")
_GRID = "#e5e5e5"
T = TypeVar("T")


def plot_reliability(reliability: Reliability | Mapping[str, Reliability]) -> Figure:
    """Accuracy against confidence by bin, with 95% intervals, and how many examples each bin has.

    Args:
        reliability: From `reliability`, or several by name.
    """
    figure, (panel, counts) = _figure(2, height=4.6, ratios=(3, 1), share=True)
    panel.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1)
    for colour, (name, bins) in _coloured(reliability, Reliability):
        panel.plot(bins.confidence, bins.accuracy, "o-", color=colour, label=name, markersize=4)
        panel.vlines(bins.confidence, *_wilson(bins), color=colour, alpha=0.5)
        counts.plot(bins.confidence, bins.count, "o-", color=colour, markersize=3, linewidth=1)
    panel.set(ylabel="share that is right", ylim=(-0.02, 1.02), xlim=(-0.02, 1.02))
    counts.set(xlabel="highest probability", ylabel="examples", yscale="log")
    return _labelled(figure, panel)


def plot_risk_coverage(curve: RiskCoverage | Mapping[str, RiskCoverage]) -> Figure:
    """Errors among what is kept, against the share that is kept.

    Args:
        curve: From `risk_coverage`, or several by name.
    """
    figure, (panel,) = _figure(1)
    for colour, (name, each) in _coloured(curve, RiskCoverage):
        label = f"{name}, area {each.area:.4f}" if name else f"area {each.area:.4f}"
        panel.plot(each.coverage, each.risk, color=colour, label=label)
    panel.set(xlabel="share of examples that is kept", ylabel="share of errors among them")
    panel.set(xlim=(0, 1), ylim=(0, None))
    return _labelled(figure, panel)


def plot_scores(inside: ArrayLike, outside: ArrayLike | Mapping[str, ArrayLike]) -> Figure:
    """Histograms of a score for known and for foreign inputs.

    Args:
        inside: Scores of inputs that the model knows.
        outside: Scores of foreign ones, or several by name.
    """
    given = outside if isinstance(outside, Mapping) else {"foreign": outside}
    known = as_scores("inside", inside)
    all_of = {"known": known, **{name: as_scores(name, each) for name, each in given.items()}}
    figure, (panel,) = _figure(1)
    highest = max(each.max().item() for each in all_of.values())
    lowest = min(each.min().item() for each in all_of.values())
    colours = ("#333333", *COLOURS)
    for number, (name, scores) in enumerate(all_of.items()):
        panel.hist(
            scores,
            40,
            range=(lowest, highest),
            density=True,
            histtype="step",
            linewidth=1.6,
            color=colours[number % len(colours)],
            label=name,
        )
    bound = known.quantile(0.95).item()
    panel.axvline(bound, color="black", linestyle="--", linewidth=1)
    on_the_left = bound - lowest > 0.7 * (highest - lowest)
    panel.annotate(
        "5% of the known\nare right of it",
        (bound, 0.97),
        xycoords=("data", "axes fraction"),
        ha="right" if on_the_left else "left",
        va="top",
        fontsize=8,
        xytext=(-4 if on_the_left else 4, 0),
        textcoords="offset points",
    )
    panel.set(xlabel="score, larger meaning foreign", ylabel="density")
    return _labelled(figure, panel)


def plot_ensemble_equivalent(
    ensemble_scores: ArrayLike, scores: Mapping[str, float] | None = None
) -> Figure:
    """Scores of deep ensembles by their size, and other methods as lines through them.

    Args:
        ensemble_scores: As of `deep_ensemble_equivalent`: those of 1, 2, 3, … members.
        scores: Of other methods, by name.
    """
    by_size = as_numbers("ensemble_scores", ensemble_scores, dims=1)
    figure, (panel,) = _figure(1)
    sizes = range(1, len(by_size) + 1)
    panel.plot(sizes, by_size, "o-", color="#333333", label="deep ensemble")
    for number, (name, score) in enumerate((scores or {}).items()):
        colour = COLOURS[number % len(COLOURS)]
        panel.axhline(score, color=colour, linestyle="--", label=name)
    panel.set(xlabel="members", ylabel="calibrated log-likelihood, nat")
    panel.set_xticks(list(sizes))
    return _labelled(figure, panel)


def plot_pit(values: ArrayLike, *, bins: int = 20) -> Figure:
    """Histogram of the probability integral transform, flat where predictions are right.

    U-shaped: too sure; a hump: not sure enough; a slope: too low or too high. Of all bars, 95% are
    expected to end between the lines.

    Args:
        values: From `GaussianMixture.cdf`, at the targets.
    """
    transformed = as_scores("values", values)
    if not 0 <= transformed.min() <= transformed.max() <= 1:
        raise ValueError(
            f"values must lie between 0 and 1, got {transformed.min():.4g} to "
            f"{transformed.max():.4g}; use mixture.cdf(targets)."
        )
    bins = require_count("bins", bins)
    figure, (panel,) = _figure(1)
    panel.hist(transformed, bins, range=(0, 1), color=COLOURS[0])
    expected = len(transformed) / bins
    half = 1.96 * math.sqrt(expected * (1 - 1 / bins))
    for bound in (max(expected - half, 0), expected + half):
        panel.axhline(bound, color="black", linestyle="--", linewidth=1)
    panel.set(xlabel="predicted probability of values up to the target", ylabel="examples")
    panel.set(xlim=(0, 1))
    return figure


def plot_coverage(
    mixture: GaussianMixture | Mapping[str, GaussianMixture], targets: ArrayLike
) -> Figure:
    """The share of targets in central intervals, against the level of these.

    Args:
        mixture: From `predict_mixture`, or several by name.
        targets: In the shape of its mean.
    """
    figure, (panel,) = _figure(1)
    panel.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1)
    levels = torch.linspace(0, 1, 101, dtype=torch.float64)
    for colour, (name, each) in _coloured(mixture, GaussianMixture):
        # The level at which an interval begins to hold its target.
        reached = (2 * each.cdf(targets) - 1).abs().flatten().sort().values
        inside = torch.searchsorted(reached, levels, side="right") / len(reached)
        panel.plot(levels, inside, color=colour, label=name)
    panel.set(xlabel="level of the interval", ylabel="share of targets inside")
    panel.set(xlim=(0, 1), ylim=(0, 1))
    return _labelled(figure, panel)


def plot_intervals(interval: Interval, targets: ArrayLike, *, most: int = 200) -> Figure:
    """Intervals in the order of their middle, with the targets in or outside of them.

    Args:
        most: Examples that are drawn, evenly chosen.
    """
    values = as_numbers("targets", targets)
    coverage = interval.coverage(values)  # It checks the shapes.
    lower, upper, values = (each.flatten() for each in (*interval, values))
    order = ((lower + upper) / 2).argsort()
    chosen = torch.linspace(0, len(order) - 1, min(require_count("most", most), len(order)))
    lower, upper, values = (each[order[chosen.long()]] for each in (lower, upper, values))
    inside = (lower <= values) & (values <= upper)
    place = torch.arange(len(values))
    figure, (panel,) = _figure(1, width=6.4)
    panel.vlines(place, lower, upper, color=COLOURS[5], linewidth=1.5, label="interval")
    panel.plot(place[inside], values[inside], ".", color="#333333", label="target inside")
    panel.plot(place[~inside], values[~inside], "x", color=COLOURS[1], label="target outside")
    panel.set(xlabel="examples, by the middle of their interval", ylabel="target")
    panel.set_title(f"{coverage:.1%} of all targets inside", fontsize=10)
    return _labelled(figure, panel)


def _figure(
    rows: int,
    *,
    width: float = 4.6,
    height: float = 3.4,
    ratios: tuple[float, ...] | None = None,
    share: bool = False,
) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(how_to_install("Plots need matplotlib", "cli")) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, 1, squeeze=False, sharex=share, height_ratios=ratios)[:, 0]
    for panel in panels:
        panel.grid(color=_GRID)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(panels)


def _wilson(bins: Reliability) -> tuple[Tensor, Tensor]:
    """95% intervals of the accuracies, which are shares of few examples in some bins."""
    shrink = 1.96**2 / bins.count.double()
    middle = (bins.accuracy + shrink / 2) / (1 + shrink)
    spread = bins.accuracy * (1 - bins.accuracy) / bins.count + shrink / (4 * bins.count)
    half = 1.96 * spread.sqrt() / (1 + shrink)
    return middle - half, middle + half


def _coloured(given: T | Mapping[str, T], kind: type[T]) -> list[tuple[str, tuple[str, T]]]:
    named: Mapping[str, Any] = given if isinstance(given, Mapping) else {"": given}
    for each in named.values():
        if not isinstance(each, kind):
            raise TypeError(
                f"A plot needs a {kind.__name__}, or several by name, got {type(each).__name__}."
            )
    return [(COLOURS[i % len(COLOURS)], item) for i, item in enumerate(named.items())]


def _labelled(figure: Figure, panel: Axes) -> Figure:
    handles, labels = panel.get_legend_handles_labels()
    if any(labels):
        panel.legend(handles, labels, frameon=False, fontsize=8)
    return figure
