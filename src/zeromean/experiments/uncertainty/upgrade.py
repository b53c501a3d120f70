"""One trained classifier three ways: as it is, trained on for the same time, and made uncertain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean import uncertainty
from zeromean.experiments.networks.evaluation import accuracy
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import bars
from zeromean.training import AddedUncertainty

if TYPE_CHECKING:
    from zeromean.data import ImageSet

# Images that are predicted at once.
BATCH = 500
# Repetitions of a prediction whose time is taken.
REPEATS = 5
LABELS = {"base": "trained", "control": "trained on", "call": "add_uncertainty"}


def measured(
    model: nn.Module, num_samples: int | None, test: ImageSet, foreign: Tensor
) -> dict[str, float]:
    """What a classifier is worth on test images, and how it tells them from foreign ones.

    Args:
        num_samples: Draws that are averaged; None for the one network of the means.
    """
    known = _probabilities(model, num_samples, test.images)
    entropies = [
        -torch.xlogy(p, p).sum(1) for p in (known, _probabilities(model, num_samples, foreign))
    ]
    return {
        "accuracy": 100 * float((known.argmax(1) == test.labels).double().mean()),
        "nll": uncertainty.negative_log_likelihood(known, test.labels),
        "calibrated_nll": -uncertainty.calibrated_log_likelihood(known, test.labels),
        "ece": uncertainty.calibration_error(known, test.labels),
        "auroc": uncertainty.auroc(*entropies),
    }


def compared(
    base: nn.Module,
    control: nn.Module,
    call: Callable[[], AddedUncertainty],
    test: ImageSet,
    foreign: Tensor,
) -> dict[str, Any]:
    """All three on the test images, and what the call costs."""
    start = time.process_time()
    result = call()
    seconds = time.process_time() - start
    num_samples = result.num_samples
    metrics: dict[str, Any] = {
        "base": measured(base, None, test, foreign),
        "control": measured(control, None, test, foreign),
        "call": measured(result.model, num_samples, test, foreign),
        # The same weights without their noise: what is left is due to the training on.
        "means": measured(result.model, None, test, foreign),
        "chosen": result.chosen,
        "added": float(result.added),
        "num_samples": num_samples,
        "seconds": seconds,
        "cost": _cost(base, result.model, num_samples, test.images[:BATCH]),
    }
    metrics["difference"] = {
        key: metrics["call"][key] - metrics["control"][key] for key in metrics["call"]
    }
    return metrics


def recalibrate_(model: nn.Module, images: Tensor) -> None:
    """Take BatchNorm's statistics anew, as the call does behind its own training."""
    zm.recalibrate_batchnorm_(model, images.split(1000), max_batches=20)


def timed_look(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, Any]:
    """What is watched after a pass: the accuracy on validation images, and the time."""
    right = accuracy(model, few, 1, sampler=zm.mean)
    return {"accuracy_mean": right, "cpu_seconds": time.process_time()}


def seconds_per_pass(history: Sequence[Mapping[str, Any]]) -> float:
    """The median over passes; those that were resumed in another process are left out."""
    times = [row["cpu_seconds"] for row in history]
    passes = [after - before for before, after in pairwise(times) if after > before]
    return median(passes)


def claims(least_accuracy: float, foreign: str) -> list[Claim]:
    """What must hold of every classifier."""
    why = ours("the bound that one call must keep to be safe to use")
    than = "add_uncertainty less plain training for the same time"

    def claim(
        metric: str, value: float, way: str, label: str, unit: str, slack: float = 0.0
    ) -> Claim:
        return Claim(metric, value, why, slack, way, label, unit)

    return [
        claim("base.accuracy", least_accuracy, "at least", "accuracy of what is given", "%"),
        claim("difference.accuracy", -0.2, "at least", f"accuracy, {than}", "points"),
        claim("difference.calibrated_nll", 0.0, "at most", f"calibrated NLL, {than}", "nat"),
        claim("difference.auroc", 0.0, "at least", f"AUROC against {foreign}, {than}", "", 0.005),
        # Two networks are two passes; a time is never exactly that.
        claim("cost", 2.0, "at most", "time of a prediction in that of one pass", "", 0.1),
        claim("time_share", 0.2, "at most", "time of the call in that of the first training", ""),
    ]


def figures(records: Sequence[Mapping[str, Any]], foreign: str) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    titles = {
        "calibrated_nll": ("Calibrated NLL", "nat"),
        "accuracy": ("Accuracy", "%"),
        "ece": ("Calibration error", "ECE"),
        "auroc": (f"Foreign images told from test images: {foreign}", "AUROC"),
    }
    shown = {**LABELS, "means": "add_uncertainty, its means"}
    return [
        bars(
            title,
            "network",
            {key: label},
            [{name: m[kind] for kind, name in shown.items()} for m in metrics],
            y_label=label,
        )
        for key, (title, label) in titles.items()
    ]


def _probabilities(model: nn.Module, num_samples: int | None, images: Tensor) -> Tensor:
    sampler = zm.mean if num_samples is None else None
    return zm.predict_proba(
        model, images, num_samples or 1, sampler=sampler, seed=0, batch_size=BATCH
    ).double()


def _cost(base: nn.Module, model: nn.Module, num_samples: int, images: Tensor) -> float:
    """Time of a prediction in that of one pass of the first network."""

    def seconds(network: nn.Module, samples: int | None) -> float:
        start = time.process_time()
        _probabilities(network, samples, images)
        return time.process_time() - start

    seconds(base, None)
    seconds(model, num_samples)  # The first time is slower.
    pairs = [(seconds(base, None), seconds(model, num_samples)) for _ in range(REPEATS)]
    one, many = zip(*pairs, strict=True)
    return min(many) / max(min(one), 1e-9)
