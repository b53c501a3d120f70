"""Random labels on CIFAR-10: the same comparison for a narrow VGG-like network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import random_labels

TITLE = "Random labels: a VGG-like network on CIFAR-10 does not memorise them"
SOURCE = random_labels.SOURCE
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS = random_labels.COVERS
VERSION = 2  # With the control on true labels, test accuracies, and the same training for all.
NOTES = (
    *random_labels.NOTES,
    "The network has a width of {setting width} of the lecture's. All four have the BatchNorm "
    "statistics of the training images without noise.",
)


@dataclass(frozen=True, kw_only=True)
class Config(random_labels.Settings):
    """A narrow VGG-like network."""

    train_size: int = 5000
    """Training images, the first ones."""
    epochs: int = 200
    """Passes over them."""
    kl_warmup_epochs: int = 50
    """Epochs over which the weight of the KL term rises to 1."""
    width: float = 0.25
    """Width of the network, in parts of the original."""
    data: str = "cifar10"
    """Data set; digits are enlarged and coloured."""


QUICK = Config(train_size=500, test_size=500, epochs=30, kl_warmup_epochs=8, width=0.1)
SMOKE = Config(train_size=100, test_size=100, epochs=2, width=0.05, batch_size=20, data="digits")
CLAIMS = random_labels.claims("VGG-like")
figures = random_labels.figures


def run(config: Config, log: RunLog) -> dict[str, Any]:
    return random_labels.compare("vgg", _vgg, config, log, identity=[config.width])


def _vgg(kind: str, config: Config) -> nn.Module:
    from zeromean.models.vgg import vgg_like

    layers: dict[str, Any] = {}
    if kind == "sparse":
        dense = random_labels.sparse_layer(zm.Linear, config)
        layers = {"dense1": dense, "dense2": dense}
        layers["conv"] = random_labels.sparse_layer(zm.Conv2d, config)
    network = vgg_like(config.width, dropout=kind == "dropout", **layers)
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
