"""Figure 9: the energy levels of variance neurons, one for each class or group of classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, trace
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import lenet
from zeromean.experiments.variance_networks.activations import log_std

TITLE = "Figure 9: energy levels of variance neurons by class"
SOURCE = "Neklyudov et al. (2019), Appendix D"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("paper: Figure 9",)
VERSION = 2  # Trained on 55,000 images, the others being the validation set.


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """LeNet-5 with dense1 a variance layer."""

    neurons: int = 4
    """Neurons that are drawn, taken at random."""


QUICK = Config(**lenet.QUICK)
SMOKE = Config(**lenet.SMOKE)
CLAIMS = [
    Claim(
        "explained",
        0.5,
        ours("half; Appendix D shows levels, without a number"),
        0.0,
        "at least",
        "share of the variance of log σ that the class explains, median over the neurons",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    trained = lenet.train("zero-mean", lenet.Network(prior="log-uniform"), config, log)
    levels = log_std(trained.model, "dense1", trained.test.images)
    explained = _explained(levels, trained.test.labels)
    log.seed_everything("neurons")
    alive = (levels.std(0) > 0).nonzero().flatten()
    chosen = alive[torch.randperm(len(alive))[: config.neurons]].tolist()
    return {
        "explained": explained.median().item(),
        "explained_by_neuron": explained.tolist(),
        "drawn": [_densities(levels[:, n], trained.test.labels) for n in chosen],
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        figure(
            f"Neuron {number}: average density of the activation",
            "activation, in units of its overall standard deviation",
            "density",
            [
                trace(f"class {c}", neuron["x"], y, error=neuron["spread"][c])
                for c, y in neuron["density"].items()
            ],
        )
        for number, neuron in enumerate(records[0]["metrics"]["drawn"], 1)
    ]


def _explained(levels: Tensor, labels: Tensor) -> Tensor:
    """Between-class over total variance of every neuron's log σ."""
    total = levels.var(0, unbiased=False)
    within = torch.zeros_like(total)
    for c in labels.unique():
        members = levels[labels == c]
        within += members.var(0, unbiased=False) * (len(members) / len(levels))
    return 1 - within / total.clamp_min(torch.finfo(total.dtype).tiny)


def _densities(levels: Tensor, labels: Tensor) -> dict[str, Any]:
    """Mean and standard deviation of the zero-mean densities of each class, on a grid."""
    std = (levels.double() - levels.double().max()).exp()
    std = std / std.square().mean().sqrt()
    grid = torch.linspace(-3, 3, 121, dtype=torch.float64)
    densities, spreads = {}, {}
    for c in labels.unique().tolist():
        # Very narrow peaks would hide everything else.
        widths = std[labels == c].clamp_min(0.02).unsqueeze(1)
        density = (-0.5 * (grid / widths).square()).exp() / (widths * math.sqrt(2 * math.pi))
        densities[c], spreads[c] = density.mean(0).tolist(), density.std(0).tolist()
    return {"x": grid.tolist(), "density": densities, "spread": spreads}
