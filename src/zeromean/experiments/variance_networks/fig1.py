"""Figure 1: the toy problem, and the two kinds of representation that a variance layer finds.

Each class has a standard deviation at each of the two variance neurons. Where the logarithms of the
two go up and down together over the classes, the neurons repeat each other; where they have nothing
to do with each other, the code is orthogonal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import zeromean as zm
from zeromean.experiments.networks import small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.figure import figure, trace
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks.activations import log_std

TITLE = "Figure 1: two variance neurons learn to repeat each other, or to be orthogonal"
SOURCE = "Neklyudov et al. (2019), section 3.2 and Figure 1"
NEEDS: tuple[str, ...] = ()
COVERS = ("paper: Figure 1", "poster: a toy example")
KINDS = ("repeating", "orthogonal", "mixed")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Several networks that differ by their initialization."""

    networks: int = 10
    """Networks to train."""
    steps: int = 21_000
    """Adam steps for each."""
    lr: float = 1e-4
    """Learning rate, which falls linearly to zero."""
    batch_size: int = 2000
    """Points in a step; 2,000 are all of them."""
    points_per_class: int = 500
    """Training points of each of the four classes, and as many for the test."""
    repeating_above: float = 0.8
    """Correlation of the log standard deviations, in absolute value, from which on neurons repeat
    each other."""
    orthogonal_below: float = 0.4
    """The same, up to which they are orthogonal."""
    seed: int = 0
    """Seed of the points, the initializations and the noise."""


NOTES = (
    "The kinds are told apart by the correlation of the log standard deviations over the "
    "classes: from {setting repeating_above} on neurons repeat each other, up to {setting "
    "orthogonal_below} they are orthogonal. Of {setting networks} networks "
    "{count.repeating:.1f} repeat, {count.orthogonal:.1f} are orthogonal and "
    "{count.mixed:.1f} are in between, in the mean over the seeds.",
)
QUICK = Config(networks=8, steps=2000, lr=1e-3, batch_size=200)
SMOKE = Config(networks=2, steps=150, lr=1e-3, batch_size=200, points_per_class=100)
CLAIMS = [
    Claim(
        "both_kinds",
        1.0,
        PAPER("Figure 1"),
        label="both kinds of representation are found among the networks",
    ),
    Claim(
        "accuracy_20_mean",
        99.0,
        ours("section 3.2 says “near perfect”, without a number"),
        0.0,
        "at least",
        label="accuracy by 20 samples, mean over the networks",
        unit="%",
    ),
    Claim(
        "accuracy_20_gap",
        0.0,
        PAPER("section 3.2, “equal”"),
        1.0,
        label="difference in accuracy between the two kinds",
        unit="points",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    networks = []
    for number in range(config.networks):
        networks.append(log.once(f"network-{number}", lambda n=number: _network(config, log, n)))
        log.metrics(**{k: v for k, v in networks[-1].items() if k not in ("activations", "labels")})
    counts = {kind: sum(n["kind"] == kind for n in networks) for kind in KINDS}
    by_kind = {
        kind: [n["accuracy_20"] for n in networks if n["kind"] == kind]
        for kind in ("repeating", "orthogonal")
    }
    means = [sum(values) / len(values) for values in by_kind.values() if values]
    return {
        "networks": networks,
        "count": counts,
        "both_kinds": float(counts["repeating"] > 0 and counts["orthogonal"] > 0),
        "accuracy_1_mean": sum(n["accuracy_1"] for n in networks) / len(networks),
        "accuracy_20_mean": sum(n["accuracy_20"] for n in networks) / len(networks),
        "accuracy_20_gap": abs(means[0] - means[1]) if len(means) == 2 else None,
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    networks = [n for record in records for n in record["metrics"]["networks"]]
    drawn = []
    for kind in ("repeating", "orthogonal"):
        examples = [n for n in networks if n["kind"] == kind]
        if examples:
            best = max(examples, key=lambda n: n["accuracy_20"])
            drawn.append(_scatter(f"Activations, {kind} neurons", best["activations"], best))
    correlations = figure(
        "Do the two neurons carry the same information?",
        "|correlation| of the two neurons’ log standard deviations over the classes",
        "accuracy by 20 samples, %",
        [
            trace(
                kind,
                [abs(n["correlation"]) for n in networks if n["kind"] == kind],
                [n["accuracy_20"] for n in networks if n["kind"] == kind],
                kind="scatter",
            )
            for kind in KINDS
        ],
    )
    return [*drawn, correlations]


def classify(levels: Tensor, *, repeating_above: float, orthogonal_below: float) -> str:
    """The kind of a code by its log standard deviations `(classes, 2)`."""
    correlation = abs(correlate(levels))
    if correlation >= repeating_above:
        return "repeating"
    return "orthogonal" if correlation <= orthogonal_below else "mixed"


def correlate(levels: Tensor) -> float:
    """Pearson's correlation of the two columns; 1 where a neuron tells no class from another."""
    centred = levels - levels.mean(0)
    norms = centred.norm(dim=0)
    if norms.min() == 0:
        return 1.0
    return float((centred[:, 0] * centred[:, 1]).sum() / norms.prod())


def _network(config: Config, log: RunLog, number: int) -> dict[str, Any]:
    from zeromean.data import toy_points
    from zeromean.models.toy import toy_network

    points, labels = toy_points(config.points_per_class)
    test_points, test_labels = toy_points(config.points_per_class)
    model = toy_network()
    checkpoint = log.folder / f"network-{number}.ckpt"
    small_networks.train(
        model,
        points,
        labels,
        steps=config.steps,
        batch_size=config.batch_size,
        lr=config.lr,
        checkpoint=checkpoint,
    )
    checkpoint.unlink(missing_ok=True)
    encoder = model.get_submodule("encoder")
    levels = log_std(encoder, "bottleneck", test_points)
    by_class = torch.stack([levels[test_labels == c].median(0).values for c in range(4)])
    shown = torch.arange(0, len(test_points), max(1, len(test_points) // 200))
    return {
        "kind": classify(
            by_class,
            repeating_above=config.repeating_above,
            orthogonal_below=config.orthogonal_below,
        ),
        "correlation": correlate(by_class),
        "log_std": by_class,
        "accuracy_1": small_networks.accuracy(zm.predict_proba(model, test_points, 1), test_labels),
        "accuracy_20": small_networks.accuracy(
            zm.predict_proba(model, test_points, 20), test_labels
        ),
        "activations": zm.sample_outputs(encoder, test_points[shown], 1)[0],
        "labels": test_labels[shown],
    }


def _scatter(title: str, activations: Any, network: Mapping[str, Any]) -> dict[str, Any]:
    traces = []
    for c, name in enumerate(("(3, 3)", "(3, 10)", "(10, 3)", "(10, 10)")):
        chosen = [a for a, c_ in zip(activations, network["labels"], strict=True) if c_ == c]
        # The spreads differ by orders of magnitude on both sides of zero.
        x, y = ([_signed_log(a[i]) for a in chosen] for i in range(2))
        traces.append(trace(f"class at {name}", x, y, kind="scatter"))
    return figure(title, "neuron 1, signed log scale", "neuron 2, signed log scale", traces)


def _signed_log(value: float) -> float:
    """asinh(10 value): linear within a tenth of zero, logarithmic beyond."""
    return torch.asinh(torch.tensor(10.0 * value, dtype=torch.float64)).item()
