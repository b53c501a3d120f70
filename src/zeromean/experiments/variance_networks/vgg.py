"""Table 2 on CIFAR: dropout against a VGG-like network whose last four layers are stochastic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeromean.experiments.networks import cifar
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.figure import bars, figure, over_seeds
from zeromean.experiments.runs.log import RunLog

NETWORKS = {"dropout": cifar.DROPOUT, "variance": cifar.VARIANCE}
PREDICTIONS = {"1": "one sample", "mean": "mean propagation", "averaged": "20 samples"}
# Of all classes one is named, to within as many points.
CHANCE_TOLERANCE = 1.0
RECIPE = (
    "The networks and the claims are the paper's, the training is ours: {setting epochs} passes "
    "over {setting train_size} images by SGD with one cycle of the rate, where the paper has 550 "
    "by Adam, at width {setting width}, computed in {bits} bits. The last 5,000 training images "
    "are the validation set."
)


def claims(
    paper: Mapping[str, tuple[float, float, float]], chance: float, metric: str = "accuracy"
) -> list[Claim]:
    """A row of Table 2 for each network: one sample, means, 20 samples.

    Args:
        paper: What the paper has; means that know nothing are at chance there.
        chance: Per cent of the images that a constant is right about.
        metric: "accuracy", or "top5" where the paper counts five guesses.
    """
    found = []
    for name, row in paper.items():
        for (key, label), value in zip(PREDICTIONS.items(), row, strict=True):
            at_chance = value == chance
            tolerance = CHANCE_TOLERANCE if at_chance else 1.0
            direction = "equal" if at_chance else "at least"
            words = f"{name}: {label}" + (", at chance" if at_chance else "")
            found.append(
                Claim(
                    f"{name}.{metric}_{key}",
                    value,
                    PAPER("Table 2"),
                    tolerance,
                    direction,
                    words,
                    "%",
                )
            )
    return found


def log_alpha_claims() -> list[Claim]:
    """What section 6.1 says of the layers of the VGG-like network."""
    return [
        Claim(
            f"least_log_alpha.{kind}",
            bound,
            PAPER("section 6.1"),
            0.0,
            "at least",
            f"log α of {label}",
        )
        for kind, bound, label in (
            ("convolutions", 15.0, "the last three convolutions, the least of them"),
            ("dense", 12.0, "the first dense layer"),
        )
    ]


def bound_claims(bound: float, metric: str, words: str) -> list[Claim]:
    """What both networks must reach."""
    return [
        Claim(
            f"{name}.{metric}_averaged",
            bound,
            ours("the bound that we set before the training"),
            0.0,
            "at least",
            f"{name}: {words}",
            "%",
        )
        for name in NETWORKS
    ]


def difference_claim(points: float, metric: str) -> Claim:
    return Claim(
        "lost_by_variance",
        0.0,
        ours("the bound that we set before the training"),
        points,
        "at most",
        f"{metric} of the variance network below that of dropout, 20 samples",
        "points",
    )


def run(config: cifar.Settings, log: RunLog, metric: str = "accuracy") -> dict[str, Any]:
    """Train both networks and measure them."""
    results: dict[str, Any] = {"bits": cifar.bits(config)}
    for name, network in NETWORKS.items():
        results[name], _ = cifar.train_and_measure(name, network, config, log)
    # Of ten classes or fewer, which the smaller sizes may have, five guesses are not counted.
    counted = metric if f"{metric}_averaged" in results["dropout"] else "accuracy"
    averaged = [results[name][f"{counted}_averaged"] for name in NETWORKS]
    results["lost_by_variance"] = averaged[0] - averaged[1]
    log_alpha = results["variance"]["log_alpha"]
    results["least_log_alpha"] = {
        "convolutions": min(v for k, v in log_alpha.items() if k.startswith("conv")),
        "dense": log_alpha["dense1"],
    }
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    rows = [{name: m[name] for name in NETWORKS} for m in metrics]
    labels = {f"accuracy_{key}": label for key, label in PREDICTIONS.items()}
    drawn = [bars("Test accuracy", "network", labels, rows)]
    if "top5_1" in metrics[0]["dropout"]:
        five = {f"top5_{key}": label for key, label in PREDICTIONS.items()}
        drawn.append(bars("Test accuracy of five guesses", "network", five, rows))
    passes = list(range(1, len(metrics[0]["dropout"]["by_epoch"]["accuracy_mean"]) + 1))
    curves = [
        over_seeds(
            f"{name}, {label}", passes, [m[name]["by_epoch"][f"accuracy_{key}"] for m in metrics]
        )
        for name in NETWORKS
        for key, label in (("sample", "one sample"), ("mean", "mean propagation"))
    ]
    drawn.append(figure("By pass", "pass", "accuracy on validation images, %", curves))
    return [*drawn, log_alpha_figure([m["variance"] for m in metrics])]


def log_alpha_figure(networks: Sequence[Mapping[str, Any]], title: str = "") -> dict[str, Any]:
    """log α of the stochastic layers by pass."""
    alphas = [network["by_epoch"]["log_alpha"] for network in networks]
    passes = list(range(1, len(next(iter(alphas[0].values()))) + 1))
    traces = [over_seeds(layer, passes, [each[layer] for each in alphas]) for layer in alphas[0]]
    return figure(title or "What becomes a variance layer", "pass", "log α", traces)
