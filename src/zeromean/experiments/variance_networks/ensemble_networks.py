"""Networks for ensembles and attacks: without noise, with dropout, and variance networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import zeromean as zm
from zeromean.experiments.networks import cifar
from zeromean.experiments.networks.evaluation import probabilities, top_accuracy
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import bars
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import vgg

TITLE = "Ensembles (CIFAR-10): the networks of Figure 7, and what averaging them gains"
SOURCE = "Neklyudov et al. (2019), Figure 7 and section 6.3: the networks, not yet the attacks"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS: tuple[str, ...] = ()
KINDS = {
    "deterministic": cifar.DETERMINISTIC,
    "dropout": cifar.DROPOUT,
    "variance": cifar.VARIANCE,
}
# Each run trains members of its own: those of seed s have the seeds 100 (s + 1) + 0, 1, 2, …
SEEDS_APART = 100
NOTES = (
    vgg.RECIPE,
    "The networks stay in the folder of models, where other experiments find them by their "
    "settings and seeds: 100 and those after it for the seed 0.",
)


@dataclass(frozen=True, kw_only=True)
class Config(cifar.Settings):
    """Eleven networks at a quarter of the width.

    2.2 to 2.6 minutes of one core a pass in float32, 1.7 hours for each.
    """

    epochs: int = 40
    """Passes over the training set. The paper has 550, by Adam."""
    width: float = 0.25
    """Width of the network, in parts of the paper's."""
    dropout: float = 0.5
    """Factor of the network's drop rates; 0 for none."""
    deterministic: int = 5
    """How many networks without noise."""
    dropout_networks: int = 1
    """How many with dropout."""
    variance: int = 5
    """How many variance networks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("deterministic", "dropout_networks", "variance"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")


QUICK = Config(**cifar.QUICK, deterministic=2, variance=2)
SMOKE = replace(Config(**cifar.SMOKE, deterministic=2, variance=2), epochs=1)
CLAIMS = [
    Claim(
        f"{kind}.gain",
        0.0,
        ours("the control: members that differ must gain by averaging"),
        0.0,
        "at least",
        f"{kind}: accuracy of the ensemble above the mean of its members",
        "points",
    )
    for kind in ("deterministic", "variance")
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    results: dict[str, Any] = {"bits": cifar.bits(config)}
    for kind in KINDS:
        networks = [trained.model for trained in members(kind, config, log)]
        results[kind] = log.once(f"measure {kind}", partial(_measure, networks, config, log))
    return results


def members(kind: str, config: Config, log: RunLog) -> list[cifar.Trained]:
    """The networks of a kind, trained or loaded."""
    counts = {
        "deterministic": config.deterministic,
        "dropout": config.dropout_networks,
        "variance": config.variance,
    }
    first = SEEDS_APART * (config.seed + 1)
    return [
        cifar.train(f"{kind} {number}", KINDS[kind], replace(config, seed=first + number), log)
        for number in range(counts[kind])
    ]


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = [{kind: record["metrics"][kind] for kind in KINDS} for record in records]
    labels = {"accuracy_member": "one network, in the mean", "accuracy_ensemble": "all of them"}
    return [bars("Test accuracy", "network", labels, rows)]


def _measure(networks: list[Any], config: Config, log: RunLog) -> dict[str, Any]:
    """Accuracies of the members, of their mean over members, and of the average of all."""
    test = cifar.images(config, "test", log)
    total, single = torch.zeros(()), []
    for number, network in enumerate(networks):
        samples = config.num_samples if _is_noisy(network) else 1
        proba = probabilities(network, test, samples, seed=number)
        single.append(top_accuracy(proba, test.labels))
        total = total + proba
    ensemble, mean = top_accuracy(total, test.labels), sum(single) / len(single)
    return {
        "accuracy": single,
        "accuracy_member": mean,
        "accuracy_ensemble": ensemble,
        "gain": ensemble - mean,
    }


def _is_noisy(network: torch.nn.Module) -> bool:
    dropout = any(isinstance(module, torch.nn.Dropout) for module in network.modules())
    return dropout or bool(zm.stochastic_layers(network))
