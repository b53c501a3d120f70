"""Section 7: a layer without a signal can be crucial, and must not be pruned by its ratio."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import evaluation
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import lenet

TITLE = "Section 7: pruning by signal-to-noise ratio ruins a variance layer"
SOURCE = "Neklyudov et al. (2019), section 7"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("paper: section 7, pruning by signal-to-noise ratio",)
LAYER = "dense1"
VARIANTS = {
    "zero_mean": "variance layer",
    "zero_mean_by_snr": "variance layer, pruned by SNR",
    "zero_mean_by_variance": "variance layer, pruned by variance",
    "additive": "additive noise",
    "additive_by_snr": "additive noise, pruned by SNR",
}
NOTES = (
    "Every weight of the variance layer has a ratio of exactly zero, so that any threshold takes "
    "the whole layer away: {zero_mean.accuracy} per cent become {zero_mean_by_snr.accuracy}. By "
    "their variances a share of {setting sparsity} of its weights can go, and "
    "{zero_mean_by_variance.accuracy} per cent stay. The control is the network with additive "
    "noise and learned means, where the ratio says what it should: log α > 3 takes "
    "{additive_by_snr.pruned} per cent of the weights away and leaves {additive_by_snr.accuracy} "
    "of {additive.accuracy} per cent. `zm.prune_` refuses to prune variance layers by their ratio.",
)


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """Two of Table 1's networks: dense1 a variance layer, or with additive noise."""

    sparsity: float = 0.98
    """Share of the variance layer's weights, those with the smallest variance, that are pruned."""


QUICK = Config(**lenet.QUICK)
SMOKE = Config(**lenet.SMOKE)
CLAIMS = [
    Claim(
        "zero_mean_by_snr.lost",
        50.0,
        ours("section 7 says “can be crucial for prediction and can't be pruned”"),
        0.0,
        "at least",
        "variance layer, pruned by its signal-to-noise ratio: accuracy lost",
        "points",
    ),
    Claim(
        "zero_mean_by_variance.lost",
        0.0,
        ours("as in Figure 5"),
        0.15,
        "at most",
        "variance layer, pruned by variance: accuracy lost",
        "points",
    ),
    Claim(
        "additive_by_snr.lost",
        0.0,
        ours("the control: where means are learned, the ratio is the right criterion"),
        0.15,
        "at most",
        "additive noise, pruned by its signal-to-noise ratio: accuracy lost",
        "points",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, posterior in (("zero_mean", "zero-mean"), ("additive", "additive")):
        network = lenet.Network(posterior=posterior, prior="log-uniform")
        trained = lenet.train(posterior, network, config, log)
        variants = {name: trained.model, f"{name}_by_snr": _pruned_by_snr(trained.model)}
        if name == "zero_mean":
            by_variance = copy.deepcopy(trained.model)
            zm.prune_(by_variance, by="variance", sparsity=config.sparsity)
            variants["zero_mean_by_variance"] = by_variance
        for variant, model in variants.items():
            # The same noise for all, so that the pruning alone makes a difference.
            accuracy = evaluation.accuracy(model, trained.test, config.num_samples, seed=0)
            results[variant] = {
                "accuracy": accuracy,
                "lost": results.get(name, {"accuracy": accuracy})["accuracy"] - accuracy,
                "pruned": 100 * zm.sparsity(model).total.sparsity,
            }
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    accuracies = [[record["metrics"][v]["accuracy"] for v in VARIANTS] for record in records]
    bars = over_seeds("20 samples", list(VARIANTS.values()), accuracies, kind="bar")
    return [figure("Test accuracy after pruning", "network", "accuracy, %", [bars])]


@torch.no_grad()
def _pruned_by_snr(model: nn.Module) -> nn.Module:
    """A copy, pruned where log α > 3; also what `prune_` refuses, as here that is the question."""
    pruned = copy.deepcopy(model)
    weight = zm.stochastic_layers(pruned)[LAYER].weight
    if weight.has_mean:
        zm.prune_(pruned, where=lambda name, layer: name == LAYER)
    else:
        weight.mask = torch.zeros(weight.shape, dtype=torch.bool)
    return pruned
