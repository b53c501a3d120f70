"""Table 3: tanh networks without biases, where even the mean activation says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeromean.experiments import lenet
from zeromean.experiments.claims import Claim
from zeromean.experiments.figure import bars
from zeromean.experiments.run_log import RunLog

TITLE = "Table 3: antisymmetric networks (tanh, no biases) with variance layers"
SOURCE = "Neklyudov et al. (2019), Appendix C"
NEEDS: tuple[str, ...] = ("mnist",)
LAYERS = {"none": (), "conv2": ("conv2",), "dense1": ("dense1",), "both": ("conv2", "dense1")}
PAPER = {  # one sample, averaged
    "none": (99.4, 99.4),
    "conv2": (98.8, 99.4),
    "dense1": (98.8, 99.2),
    "both": (93.2, 97.5),
}


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """Four networks that differ by their variance layers."""

    epochs: int = 40
    """Passes over the training set. The paper has 200; the accuracies have their plateau before."""
    batchnorm: bool = True
    """BatchNorm without its affine map. Without it the networks are antisymmetric to the letter,
    but lose the scale of what follows a variance layer."""


QUICK = Config(**lenet.QUICK)
SMOKE = Config(**lenet.SMOKE)
CLAIMS = [
    Claim(
        f"{name}.{metric}",
        value,
        "Table 3",
        0.15,
        "at least",
        f"variance layers: {name}; {how}",
        "%",
    )
    for name, row in PAPER.items()
    for metric, how, value in zip(
        ("accuracy_1", "accuracy_averaged"), ("one sample", "averaged"), row, strict=True
    )
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    networks = {
        name: lenet.Network(
            layers=layers, activation="Tanh", bias=False, batchnorm=config.batchnorm
        )
        for name, layers in LAYERS.items()
    }
    return lenet.compare(networks, config, log)


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    labels = {
        "accuracy_1": "one sample",
        "accuracy_mean": "mean propagation",
        "accuracy_averaged": "averaged",
    }
    metrics = [record["metrics"] for record in records]
    return [bars("Test accuracy of tanh networks", "variance layers", labels, metrics)]
