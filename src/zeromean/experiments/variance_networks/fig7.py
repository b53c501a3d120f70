"""Figure 7: adversarial attacks on deterministic, dropout and variance networks, and ensembles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeromean.experiments.networks import cifar
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import attacks, ensemble_networks

TITLE = "Figure 7: attacks on variance networks, dropout and ensembles (CIFAR-10)"
SOURCE = "Neklyudov et al. (2019), Figure 7 and section 6.3"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS = ("paper: Figure 7",)
# Which networks predict together: their kind, and whether there are several.
GROUPS = {
    "deterministic": ("deterministic", False),
    "dropout": ("dropout", False),
    "deep_ensemble": ("deterministic", True),
    "variance": ("variance", False),
    "variance_ensemble": ("variance", True),
}
LABELS = {
    "deterministic": "deterministic",
    "dropout": "dropout",
    "deep_ensemble": "deep ensemble",
    "variance": "variance",
    "variance_ensemble": "variance ensemble",
}
NOTES = (
    "The attack is the paper's; next to it EoT-PGD and AutoAttack-rand average over the noise, and "
    "everything they find is judged with fresh noise. A network for which a check says suspicious "
    "has not been shown to resist anything.",
)


@dataclass(frozen=True, kw_only=True)
class Config(attacks.Settings, ensemble_networks.Config):
    """The networks of `ensemble_networks`, under attack."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attacked < 1:
            raise ValueError(f"attacked must be at least 1, got {self.attacked}.")


MEMBERS: dict[str, Any] = {"deterministic": 2, "variance": 2}
QUICK = Config(**cifar.QUICK, **MEMBERS, attacked=100, iterations=40)
SMOKE = Config(**{**cifar.SMOKE, **attacks.SMOKE, **MEMBERS, "epochs": 1})
CLAIMS = [
    Claim(
        "gain.variance_over_dropout",
        0.0,
        PAPER("Figure 7"),
        0.0,
        "at least",
        "success of the attack on dropout above that on the variance network",
        "points",
    ),
    Claim(
        "gain.variance_ensemble_over_deep_ensemble",
        0.0,
        PAPER("Figure 7"),
        0.0,
        "at least",
        "success of the attack on the deep ensemble above that on the variance ensemble",
        "points",
    ),
    Claim(
        "suspicious",
        0.0,
        ours("the control: no sign of masked gradients in any of the five"),
        0.0,
        "at most",
        "checks of gradients that fail",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    test = cifar.images(config, "test", log)
    results: dict[str, Any] = {}
    for name, (kind, several) in GROUPS.items():
        trained = ensemble_networks.members(kind, config, log)
        networks = [each.model.eval() for each in (trained if several else trained[:1])]
        noisy = kind != "deterministic"
        results[name] = attacks.attack(name, networks, noisy, test, config, log, seed=config.seed)
    # In the mean over the steps, as one compares curves by eye.
    mean = {
        name: sum(row["fast_sign"]["success"]) / len(row["fast_sign"]["success"])
        for name, row in results.items()
    }
    results["gain"] = {
        "variance_over_dropout": mean["dropout"] - mean["variance"],
        "variance_ensemble_over_deep_ensemble": mean["deep_ensemble"] - mean["variance_ensemble"],
    }
    results["suspicious"] = sum(results[name]["autoattack"]["suspicious"] for name in GROUPS)
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return attacks.figures([record["metrics"] for record in records], LABELS)
