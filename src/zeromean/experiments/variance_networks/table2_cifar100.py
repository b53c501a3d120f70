"""Table 2, the rows of CIFAR-100: the VGG-like network at half of its width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeromean.experiments.networks import cifar
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import vgg

TITLE = "Table 2 (CIFAR-100): dropout against variational dropout in the last layers of a VGG"
SOURCE = "Neklyudov et al. (2019), Table 2"
NEEDS: tuple[str, ...] = ("cifar100",)
COVERS = ("paper: Table 2 on CIFAR-100",)
NOTES = (
    vgg.RECIPE,
    "The paper does not say that it counts five guesses. Its mean propagation of the variance "
    "network, {claim variance.top5_mean} per cent, does: five of a hundred classes are chance. So "
    "its numbers stand next to our five guesses, and those of one guess beside them.",
)


@dataclass(frozen=True, kw_only=True)
class Config(cifar.Settings):
    """Two networks at half of the width.

    8 minutes of one core a pass in float32, 5 hours for each.
    """

    epochs: int = 40
    """Passes over the training set. The paper has 550, by Adam."""
    width: float = 0.5
    """Width of the network, in parts of the paper's."""
    data: str = "cifar100"
    """Data set: cifar10, cifar100, or digits (enlarged and coloured)."""


QUICK = Config(**cifar.QUICK)
SMOKE = Config(**cifar.SMOKE)
CLAIMS = [
    *vgg.claims(
        {"dropout": (77.5, 79.8, 81.7), "variance": (76.9, 5.0, 82.2)}, chance=5.0, metric="top5"
    ),
    *vgg.bound_claims(80.0, "top5", "20 samples, five guesses"),
    vgg.difference_claim(0.7, "accuracy of five guesses"),
]
figures = vgg.figures


def run(config: Config, log: RunLog) -> dict[str, Any]:
    return vgg.run(config, log, metric="top5")
