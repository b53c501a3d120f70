"""Figure 5: a variance layer pruned by its standard deviations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import zeromean as zm
from zeromean.experiments.networks import evaluation
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import lenet

TITLE = "Figure 5: pruning a variance layer by σ"
SOURCE = "Neklyudov et al. (2019), Figure 5 and section 6.1"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("paper: Figure 5",)
VERSION = 2  # Trained on 55,000 images, the others being the validation set.
REFERENCE = 0.98


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """LeNet-5 with dense1 a variance layer."""

    sparsities: tuple[float, ...] = (0.0, 0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
    """Shares of the weights, those with the smallest σ, that are set to zero."""


QUICK = Config(**lenet.QUICK)
SMOKE = Config(**lenet.SMOKE, sparsities=(0.0, 0.98))
CLAIMS = [
    Claim(
        "lost_at_98",
        0.0,
        PAPER("section 6.1, “no accuracy degradation”"),
        0.15,
        "at most",
        "accuracy lost with 98% of the weights at zero",
        "points",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    if not all(0 <= share < 1 for share in config.sparsities):
        raise ValueError(f"sparsities must lie between 0 and 1, got {config.sparsities}.")
    trained = lenet.train("zero-mean", lenet.Network(prior="log-uniform"), config, log)
    posterior = zm.stochastic_layers(trained.model)["dense1"].weight
    assert isinstance(posterior, zm.ZeroMean)
    scale = posterior.scale.detach().clone()
    order = scale.abs().flatten().argsort()

    def accuracy(share: float) -> float:
        pruned = scale.flatten().clone()
        pruned[order[: round(share * len(order))]] = 0.0
        with torch.no_grad():
            posterior.scale.copy_(pruned.view_as(scale))
        # The same noise for every share, so that only the pruning makes a difference.
        return evaluation.accuracy(trained.model, trained.test, config.num_samples, seed=0)

    accuracies = {s: log.once(f"sparsity {s}", lambda s=s: accuracy(s)) for s in config.sparsities}
    reference = min(accuracies, key=lambda share: abs(share - REFERENCE))
    return {
        "sparsity": list(accuracies),
        "accuracy": list(accuracies.values()),
        "accuracy_unpruned": accuracies[min(accuracies)],
        "lost_at_98": accuracies[min(accuracies)] - accuracies[reference],
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    curve = over_seeds(
        "averaged over samples", metrics[0]["sparsity"], [m["accuracy"] for m in metrics]
    )
    label = "share of the weights at zero"
    return [figure("Test accuracy of the pruned layer", label, "accuracy, %", [curve])]
