"""Sparse variational dropout on LeNet-5-Caffe, and magnitude pruning beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeromean.experiments import sparse_networks
from zeromean.experiments.run_log import RunLog
from zeromean.experiments.sparse_networks import figures as figures

TITLE = "Sparse variational dropout: LeNet-5-Caffe"
SOURCE = "lectures on Bayesian networks, sparse variational dropout; Molchanov et al. (2017)"
NEEDS: tuple[str, ...] = ("mnist",)


@dataclass(frozen=True, kw_only=True)
class Config(sparse_networks.Settings):
    """LeNet-5-Caffe, all four layers sparse."""

    epochs: int = 50
    """Epochs of sparse variational dropout, from scratch."""
    dense_epochs: int = 15
    """Epochs of the network that is not sparse."""
    magnitude: tuple[float, ...] = (12.0, 50.0, 280.0)
    """Compression factors to which that one is pruned by magnitude, one after the other."""
    retraining_epochs: int = 5
    """Epochs of training after each of these steps."""


QUICK = Config(**sparse_networks.QUICK)
SMOKE = Config(**sparse_networks.SMOKE)
CLAIMS = sparse_networks.claims(
    "lecture: sparse variational dropout",
    error=(0.75, 0.85),
    compression=280,
    dense_error=0.80,
    sparsity={"conv1": 67.0, "conv2": 98.0, "dense1": 99.8, "dense2": 95.0},
)


def run(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean.models import lenet5_caffe

    return sparse_networks.run(lenet5_caffe, config, log)
