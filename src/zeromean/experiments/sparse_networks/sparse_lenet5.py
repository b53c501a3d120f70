"""Sparse variational dropout on LeNet-5-Caffe, compared with magnitude pruning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from zeromean.experiments.runs.documents import MOLCHANOV
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import lenet_figures, lenet_training, lenets

TITLE = "Sparse variational dropout: LeNet-5-Caffe"
SOURCE = "lectures on Bayesian networks, sparse variational dropout; Molchanov et al. (2017)"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = (
    "chirkova: LeNets on MNIST",
    "molchanov: LeNets on MNIST",
    "chirkova: visualization",
    "molchanov: visualization",
)
VERSION = 2  # Trained on 55,000 images, the others being the validation set.
# Of the lecture: error in per cent, and weights over weights left.
QUOTED = {
    "pruning, Han et al. (2015)": (0.77, 12),
    "dynamic network surgery (DNS)": (0.91, 111),
    "soft weight sharing (SWS)": (0.97, 200),
    "sparse variational dropout, lecture": (0.75, 280),
}
NOTES = (
    lenet_figures.sentence_about(QUOTED),
    "The network is the one that the authors of sparse variational dropout published: with "
    "ReLU behind the convolutions, which Caffe's own has not. It starts from the network that "
    "is not sparse.",
)


@dataclass(frozen=True, kw_only=True)
class Config(lenet_training.Settings):
    """LeNet-5-Caffe, all four layers sparse."""

    epochs: int = 120
    """Epochs of sparse variational dropout."""
    shrink_after: tuple[int, ...] = (20, 35)
    """Epochs after which empty units are taken out of the network, so that the rest is faster. The
    learning rate falls after the last of them only."""
    pretrained: bool = True
    """Start from the network that is not sparse, in place of random means."""
    lr: float = 2e-3
    """Adam's learning rate for means and biases, which falls linearly to zero."""
    dense_epochs: int = 15
    """Epochs of the network that is not sparse."""
    magnitude: tuple[float, ...] = (12.0, 50.0, 280.0)
    """Compression factors to which that one is pruned by magnitude, one after the other."""
    retraining_epochs: int = 5
    """Epochs of training after each of these steps."""


QUICK = Config(**lenet_training.QUICK, shrink_after=(5,))
SMOKE = Config(**lenet_training.SMOKE, shrink_after=(2,))
CLAIMS = lenets.claims(
    MOLCHANOV("LeNets on MNIST"),
    error=(0.75, 0.85),
    compression=280,
    dense_error=0.80,
    sparsity={"conv1": 67.0, "conv2": 98.0, "dense1": 99.8, "dense2": 95.0},
)


def relu_lenet5_caffe(**layers: Any) -> nn.Module:
    """LeNet-5-Caffe as sparse variational dropout was published with: ReLU behind convolutions."""
    from zeromean.models.lenet import lenet5_caffe

    return lenet5_caffe(**layers, conv_activation=nn.ReLU)


def run(config: Config, log: RunLog) -> dict[str, Any]:
    return lenets.run(relu_lenet5_caffe, config, log)


figures = partial(lenet_figures.figures, quoted=QUOTED)
