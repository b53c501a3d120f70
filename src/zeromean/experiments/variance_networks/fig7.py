"""Figure 7: adversarial attacks on deterministic, dropout and variance networks, and ensembles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import attacks

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Figure 7: attacks on variance networks, dropout and ensembles (CIFAR-10)"
SOURCE = "Neklyudov et al. (2019), Figure 7 and section 6.3"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS: tuple[str, ...] = ()
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
STOCHASTIC = ("conv11", "conv12", "conv13", "dense1")
# Each run trains members of its own: those of seed s have the seeds 100 (s + 1) + 0, 1, 2, …
SEEDS_APART = 100
NOTES = (
    "The attack is the paper's; next to it EoT-PGD and AutoAttack-rand average over the noise, and "
    "everything they find is judged with fresh noise. A network for which a check says suspicious "
    "has not been shown to resist anything.",
)


@dataclass(frozen=True, kw_only=True)
class Config(attacks.Settings):
    """VGG-like networks at a quarter of the width."""

    epochs: int = 40
    """Passes over the training set. The paper has 550, by Adam."""
    width: float = 0.25
    """Width of the networks, in parts of the paper's."""
    members: int = 5
    """Networks in an ensemble."""
    lr: float = 0.1
    """Rate of SGD at its peak."""
    batch_size: int = 128
    """Images in a mini-batch."""
    train_size: int = 45_000
    """Training images, the first ones."""
    data: str = "cifar10"
    """Data set; digits are enlarged and coloured."""
    seed: int = 0
    """Seed of the networks, the targets and the noise."""

    def __post_init__(self) -> None:
        for name in ("members", "attacked", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")


QUICK = Config(epochs=6, train_size=5000, members=2, attacked=100, iterations=40, width=0.1)
SMOKE = Config(
    **attacks.SMOKE,
    epochs=1,
    width=0.05,
    members=2,
    batch_size=32,
    train_size=96,
    data="digits",
)
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
    test = _images(config, "test", log)
    results: dict[str, Any] = {}
    for name, (kind, several) in GROUPS.items():
        networks = members(kind, config.members if several else 1, config, log)
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


def members(kind: str, count: int, config: Config, log: RunLog) -> list[nn.Module]:
    """The first networks of a kind, trained or loaded."""
    first = SEEDS_APART * (config.seed + 1)
    return [
        _train(kind, number, replace(config, seed=first + number), log) for number in range(count)
    ]


def _train(kind: str, number: int, config: Config, log: RunLog) -> nn.Module:
    from zeromean.training import TrainingConfig

    settings = TrainingConfig(
        epochs=config.epochs,
        batch_size=config.batch_size,
        optimizer="sgd",
        decay="one-cycle",
        lr=config.lr,
        weight_decay=5e-4,
        label_smoothing=0.1,
        log_alpha_lr=0.03,
        log_alpha_beta2=0.95,
        clip_log_alpha=(-20, 20) if kind == "variance" else None,
        seed=config.seed,
    )
    described = {key: value for key, value in settings.described().items() if key != "seed"}
    identity = {
        "experiment": "fig7",
        "network": ["vgg", kind, config.width],
        "training": described,
        "data": [config.data, config.train_size],
    }
    data = _images(config, "rest", log)
    build = partial(_build, kind, config.width)
    trained = shared_networks.train(f"{kind} {number}", identity, build, data, settings, log)
    return trained.model.eval()


def _build(kind: str, width: float) -> nn.Module:
    from zeromean.models.vgg import vgg_like

    layers: dict[str, Any] = {}
    if kind == "variance":
        posterior = partial(zm.Multiplicative, share="layer", log_alpha=-10.0)
        for name in STOCHASTIC:
            layer = zm.Conv2d if name.startswith("conv") else zm.Linear
            layers[name] = partial(layer, posterior=posterior, prior=zm.LogUniform())
    network = vgg_like(width, dropout=kind != "deterministic", **layers)
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _images(config: Config, split: str, log: RunLog) -> ImageSet:
    """The first training images, or the test images."""
    from zeromean import data

    loaded = data.load(config.data, split, data_dir=log.data_dir)
    size = config.train_size if split == "rest" else len(loaded)
    chosen = loaded.subset(torch.arange(min(size, len(loaded))))
    if config.data != "digits":
        return chosen
    images = F.interpolate(chosen.images, (32, 32), mode="bilinear").expand(-1, 3, -1, -1)
    return type(chosen)(images.contiguous(), chosen.labels, chosen.num_classes)
