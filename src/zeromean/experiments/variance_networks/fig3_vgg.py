"""Figures 3 and 8 as the paper has them: the phase transition of a VGG-like network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from zeromean.experiments.networks import cifar, distributions
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import phase_transition, vgg
from zeromean.experiments.variance_networks.phase_transition import SLOW

TITLE = "Figures 3 and 8 (CIFAR-10): a VGG moves its information from means to variances"
SOURCE = "Neklyudov et al. (2019), Figures 3 and 8, section 4.3"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS = ("paper: Figure 3 on CIFAR-10", "paper: Figure 8 on CIFAR-10")
PRIORS = ("log-uniform", "ard", "student-t", SLOW)
# They must have known something before: in the first passes they are at chance as well.
KNOWN = 60.0
NOTES = (
    vgg.RECIPE,
    "Student's t is computed by quadrature, and by one sample as the paper did it. A run whose "
    "means never fall below one half counts with all its passes: "
    "{log-uniform.passes_to_transition} (log-uniform), {ard.passes_to_transition} (ARD), "
    "{student-t.passes_to_transition} and, with one sample, "
    "{student-t-sample.passes_to_transition} passes.",
)


@dataclass(frozen=True, kw_only=True)
class Config(cifar.Settings):
    """One network for each prior, at a quarter of the width.

    2.6 minutes of one core a pass in float32 and half a minute to watch it, 2 hours for each.
    """

    epochs: int = 40
    """Passes over the training set. The paper has 550, by Adam."""
    width: float = 0.25
    """Width of the network, in parts of the paper's."""
    dropout: float = 0.0
    """Factor of the network's drop rates; 0 for none."""
    priors: tuple[str, ...] = PRIORS
    """log-uniform, ard, student-t (quadrature), student-t-sample (one sample, as the paper did)."""


QUICK = Config(**cifar.QUICK)
SMOKE = replace(Config(**cifar.SMOKE), epochs=1, look_size=20)
CLAIMS = [
    *(
        Claim(
            f"{prior}.accuracy_mean",
            10.0,
            PAPER("Figures 3 and 8"),
            1.0,
            "equal",
            f"{prior}: mean propagation is at chance",
            "%",
        )
        for prior in PRIORS
    ),
    *(
        Claim(
            f"{prior}.accuracy_lost",
            0.0,
            PAPER("Figure 3"),
            0.5,
            "at most",
            f"{prior}: accuracy lost by dropping the means in the end",
            "points",
        )
        for prior in PRIORS
    ),
    phase_transition.SLOW_CLAIM,
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    phase_transition.require_priors(config.priors, distributions.PRIORS)
    results: dict[str, Any] = {"bits": cifar.bits(config)}
    for prior in config.priors:
        network = replace(cifar.VARIANCE, prior=prior)
        row, trained = cifar.train_and_measure(
            prior, network, config, log, watch=cifar.look_closely
        )
        row["accuracy_zero_mean"] = log.once(
            f"drop {prior}",
            partial(
                phase_transition.accuracy_without_means,
                trained.model,
                trained.test,
                config.num_samples,
            ),
        )
        row["accuracy_lost"] = row["accuracy_averaged"] - row["accuracy_zero_mean"]
        row["passes_to_transition"] = transition(row["by_epoch"]["accuracy_mean"])
        results[prior] = row
    return results | phase_transition.slowness(results, "passes_to_transition")


def transition(accuracies: Sequence[float]) -> int:
    """The first pass after which means that knew something are wrong more often than not."""
    known = False
    for passed, value in enumerate(accuracies, start=1):
        known |= value >= KNOWN
        if known and value < phase_transition.TRANSITION:
            return passed
    return len(accuracies)


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    priors = [name for name in PRIORS if name in metrics[0]]
    drawn = [
        phase_transition.accuracy_figure(prior, "pass", [m[prior]["by_epoch"] for m in metrics])
        for prior in priors
    ]
    alphas = [
        vgg.log_alpha_figure([m[prior] for m in metrics], f"log α, {prior} prior")
        for prior in priors
    ]
    return [*drawn, *alphas]
