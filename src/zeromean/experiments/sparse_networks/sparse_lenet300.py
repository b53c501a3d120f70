"""Sparse variational dropout on LeNet-300-100, compared with magnitude pruning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from zeromean.experiments.runs.documents import MOLCHANOV
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import lenet_figures, lenet_training, lenets

TITLE = "Sparse variational dropout: LeNet-300-100"
SOURCE = "lectures on Bayesian networks, sparse variational dropout; Molchanov et al. (2017)"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = (
    "chirkova: LeNets on MNIST",
    "molchanov: LeNets on MNIST",
    "molchanov: quantization",
    "chirkova: other compression",
)
VERSION = 2  # Trained on 55,000 images, the others being the validation set.
# Of the lecture: error in per cent, and weights over weights left.
QUOTED = {
    "pruning, Han et al. (2015)": (1.59, 12),
    "dynamic network surgery (DNS)": (1.99, 56),
    "soft weight sharing (SWS)": (1.94, 23),
    "sparse variational dropout, lecture": (1.92, 68),
}
NOTES = (lenet_figures.sentence_about(QUOTED),)


@dataclass(frozen=True, kw_only=True)
class Config(lenet_training.Settings):
    """LeNet-300-100, all three layers sparse."""


QUICK = Config(**lenet_training.QUICK)
SMOKE = Config(**lenet_training.SMOKE)
CLAIMS = lenets.claims(
    MOLCHANOV("LeNets on MNIST"),
    error=(1.92, 1.95),
    compression=68,
    dense_error=1.64,
    sparsity={"dense1": 98.9, "dense2": 97.2, "dense3": 62.0},
)


def run(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean.models.lenet import lenet_300_100

    return lenets.run(lenet_300_100, config, log)


figures = partial(lenet_figures.figures, quoted=QUOTED)
