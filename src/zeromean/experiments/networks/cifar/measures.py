"""What is measured of networks on CIFAR, while they train and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

import zeromean as zm
from zeromean.experiments.networks.cifar.settings import Settings
from zeromean.experiments.networks.evaluation import (
    accuracy,
    drop_means,
    log_alphas,
    probabilities,
    top_accuracy,
)

if TYPE_CHECKING:
    from zeromean.data import ImageSet


class Trained(NamedTuple):
    """A network after its training."""

    model: nn.Module
    history: list[dict[str, Any]]
    train: ImageSet
    test: ImageSet


def look(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, Any]:
    """What is watched after a pass, on a few images."""
    row: dict[str, Any] = {
        "accuracy_mean": accuracy(model, few, 1, sampler=zm.mean),
        "accuracy_sample": accuracy(model, few, 1, seed=epoch),
    }
    return row | ({"log_alpha": alphas} if (alphas := log_alphas(model)) else {})


def look_closely(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, Any]:
    """The same, with ensembles of ten samples: as it is, and without its means."""
    row = look(few, epoch, model) | {"accuracy_ensemble": accuracy(model, few, 10, seed=epoch)}
    dropped, _ = drop_means(model, few.images[:10])
    if dropped is not None:
        row["accuracy_zero_mean"] = accuracy(dropped, few, 10, seed=epoch)
    return row


def measure(trained: Trained, settings: Settings) -> dict[str, Any]:
    """Test accuracies of one sample, of the means and of the average, for one and five guesses."""
    model, _, _, test = trained
    row: dict[str, Any] = {"log_alpha": log_alphas(model)}
    for key, num_samples, sampler, seed in (
        ("1", 1, None, 1),
        ("mean", 1, zm.mean, None),
        ("averaged", settings.num_samples, None, 2),
    ):
        proba = probabilities(model, test, num_samples, sampler=sampler, seed=seed)
        row[f"accuracy_{key}"] = top_accuracy(proba, test.labels)
        if test.num_classes > 10:
            row[f"top5_{key}"] = top_accuracy(proba, test.labels, 5)
    return row


def by_epoch(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns of what was watched: accuracies, and log α of every layer."""
    first = history[0]
    columns: dict[str, Any] = {
        key: [row[key] for row in history] for key in first if key.startswith("accuracy_")
    }
    if "log_alpha" in first:
        columns["log_alpha"] = {
            layer: [row["log_alpha"][layer] for row in history] for layer in first["log_alpha"]
        }
    return columns
