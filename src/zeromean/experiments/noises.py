"""Section 3.3: Gaussian, Bernoulli and uniform variance layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeromean.experiments import lenet
from zeromean.experiments.claims import Claim
from zeromean.experiments.figure import bars
from zeromean.experiments.run_log import RunLog

TITLE = "Section 3.3: Gaussian, Bernoulli and uniform noise"
SOURCE = "Neklyudov et al. (2019), section 3.3"
NEEDS: tuple[str, ...] = ("mnist",)
NETWORKS = {
    "Gaussian": lenet.Network(prior="log-uniform"),
    "Gaussian, weight sampling": lenet.Network(prior="log-uniform", sampler="weight"),
    "Bernoulli": lenet.Network(noise="rademacher", sampler="weight"),
    "uniform": lenet.Network(noise="uniform", sampler="weight"),
}


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """Four networks that differ by the noise of dense1 and by how it is drawn."""

    epochs: int = 60
    """Passes over the training set; the paper has 200."""
    local_epochs: int = 16
    """At most so many with local reparameterization, which learns faster than noise that a batch
    shares."""


QUICK = Config(**lenet.QUICK)
SMOKE = Config(**lenet.SMOKE)
CLAIMS = [
    Claim(
        f"{name}.accuracy_averaged",
        value,
        "section 3.3",
        0.15,
        "at least",
        f"{name}: averaged",
        "%",
    )
    for name, value in {"Gaussian": 99.3, "Bernoulli": 98.7, "uniform": 98.7}.items()
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    local = lenet.at_most(config, config.local_epochs)
    return {
        name: lenet.train_and_measure(name, network, config if _shared(network) else local, log)
        for name, network in NETWORKS.items()
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    labels = {"accuracy_1": "one sample", "accuracy_averaged": "averaged"}
    metrics = [record["metrics"] for record in records]
    return [bars("Test accuracy by the noise of the variance layer", "noise", labels, metrics)]


def _shared(network: lenet.Network) -> bool:
    """Whether the objects of a batch share their noise."""
    return network.sampler == "weight"
