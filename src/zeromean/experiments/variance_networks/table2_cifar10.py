"""Table 2, the rows of CIFAR-10: the VGG-like network at full width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeromean.experiments.networks import cifar
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import vgg

TITLE = "Table 2 (CIFAR-10): dropout against variational dropout in the last layers of a VGG"
SOURCE = "Neklyudov et al. (2019), Table 2 and section 6.1"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS = (
    "paper: Table 2 on CIFAR-10",
    "paper: section 6.1, log α of VGG",
    "poster: classification, VGG-like",
)
NOTES = (
    vgg.RECIPE,
    "log α starts at −10 and is kept within ±20, as in the authors' code; no mean is dropped by "
    "hand. The figure shows log α of the four layers by pass.",
)


@dataclass(frozen=True, kw_only=True)
class Config(cifar.Settings):
    """Two networks at full width.

    25 minutes of one core a pass in float32, 12 hours for each.
    """


QUICK = Config(**cifar.QUICK)
SMOKE = Config(**cifar.SMOKE)
CLAIMS = [
    *vgg.claims({"dropout": (91.0, 93.1, 93.4), "variance": (91.3, 10.0, 93.4)}, chance=10.0),
    *vgg.log_alpha_claims(),
    *vgg.bound_claims(92.5, "accuracy", "20 samples"),
    vgg.difference_claim(0.5, "accuracy"),
]
figures = vgg.figures


def run(config: Config, log: RunLog) -> dict[str, Any]:
    return vgg.run(config, log)
