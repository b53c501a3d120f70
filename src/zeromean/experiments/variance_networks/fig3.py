"""Figures 3 and 8: the phase transition by epoch, for three priors, and the certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import lenet, phase_transition

TITLE = "Figures 3 and 8 (on LeNet-5): information moves from the means to the variances"
SOURCE = "Neklyudov et al. (2019), Figures 3 and 8, section 4.3"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = (
    "paper: Figure 3",
    "paper: Figure 8",
    "paper: Figure 8, the slow curve",
    "poster: from variational dropout to variance networks",
)
VERSION = 2  # Trained on 55,000 images, the others being the validation set.
PRIORS = ("log-uniform", "student-t", "ard")
NOTES = (
    "All priors have the same {setting epochs} passes and the same rates. The curves are what "
    "Figures 3 and 8 show, here of LeNet-5 on MNIST: the accuracy of the means, of one "
    "sample, of the ensemble, and of the ensemble without its means. At the end log α of "
    "dense1 is {log-uniform.log_alpha.dense1} (log-uniform), {student-t.log_alpha.dense1} "
    "(Student's t) and {ard.log_alpha.dense1} (ARD), and mean propagation is right for "
    "{log-uniform.accuracy_mean}, {student-t.accuracy_mean} and {ard.accuracy_mean} per cent "
    "of the images.",
    "The paper's Student-t curve is slow because its KL is estimated by one sample, whose "
    "gradient drowns in noise where α is large (see the experiment on gradient variance). "
    "Ours is exact, and at ν = 10⁻¹⁶ the prior is the log-uniform one in all but name. With one "
    "sample, as the paper did it, the means fall below one half after "
    "{student-t-sample.epochs_to_transition} passes (a run that does not get there counts with "
    "all its passes), with the log-uniform prior after {log-uniform.epochs_to_transition}.",
)


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """LeNet-5 with dense1 stochastic, one α for the layer."""

    priors: tuple[str, ...] = (*PRIORS, phase_transition.SLOW)
    """log-uniform, student-t (quadrature), student-t-sample (one sample, as the paper did), ard."""


QUICK = Config(**lenet.QUICK)
SMOKE = Config(**lenet.SMOKE)
CLAIMS = [
    claim
    for prior in PRIORS
    for claim in (
        lenet.means_know_nothing(
            prior, PAPER("section 4.3, “the same results for all mentioned prior distributions”")
        ),
        Claim(
            f"{prior}.accuracy_lost",
            0.0,
            PAPER("Figure 3, there on CIFAR-10"),
            0.2,
            "at most",
            f"{prior}: accuracy lost by dropping the means in the end",
            "points",
        ),
        Claim(
            f"{prior}.excess",
            0.0,
            ours("our certificate, which is below the bound of equation (38)"),
            0.0,
            "at most",
            f"{prior}: measured change above the certificate, worst image of all epochs",
        ),
    )
]
CLAIMS.append(phase_transition.SLOW_CLAIM)


def run(config: Config, log: RunLog) -> dict[str, Any]:
    phase_transition.require_priors(config.priors, lenet.LAYER_PRIORS)
    results = {}
    for prior in config.priors:
        network = lenet.Network(posterior="layer", prior=prior)
        trained = lenet.train(prior, network, config, log)
        keys = [*phase_transition.CURVES, "certificate", "change"]
        fallen = [row["accuracy_mean"] < phase_transition.TRANSITION for row in trained.history]
        curves = {key: [row[key] for row in trained.history] for key in keys}
        final = lenet.train_and_measure(prior, network, config, log)
        zero_mean = phase_transition.accuracy_without_means(
            trained.model, trained.test, config.num_samples
        )
        results[prior] = {
            **final,
            "curves": curves,
            "accuracy_zero_mean": zero_mean,
            "accuracy_lost": final["accuracy_averaged"] - zero_mean,
            "excess": max(row["excess"] for row in trained.history),
            "epochs_to_transition": 1 + (fallen.index(True) if any(fallen) else len(fallen)),
        }
    return results | phase_transition.slowness(results, "epochs_to_transition")


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    priors = [name for name, value in metrics[0].items() if isinstance(value, dict)]
    epochs = list(range(1, len(metrics[0][priors[0]]["curves"]["change"]) + 1))
    drawn = []
    for prior in priors:
        curves = [m[prior]["curves"] for m in metrics]
        changes = [
            over_seeds(label, epochs, [c[key] for c in curves])
            for key, label in (("certificate", "certificate"), ("change", "measured"))
        ]
        drawn += [
            phase_transition.accuracy_figure(prior, "epoch", curves),
            figure(
                f"Change when the means are dropped, {prior} prior",
                "epoch",
                "change of a probability, mean over images",
                changes,
                y_log=True,
            ),
        ]
    means = [
        over_seeds(prior, epochs, [m[prior]["curves"]["accuracy_mean"] for m in metrics])
        for prior in priors
    ]
    label = "accuracy of the means on validation images, %"
    return [*drawn, figure("When the means lose what they know", "epoch", label, means)]
