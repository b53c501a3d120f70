"""MNIST against Fashion-MNIST, notMNIST and rotated digits, and how good its probabilities are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from zeromean import uncertainty
from zeromean.experiments.networks import shared_networks, small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import CHIRKOVA, MOLCHANOV
from zeromean.experiments.runs.figure import bars
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.uncertainty import methods
from zeromean.prediction.probabilities import cross_entropy

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Out of distribution: MNIST against other images, six ways to uncertainty"
SOURCE = "Molchanov, lecture: uncertainty estimation; Chirkova, lecture: ensembling"
NEEDS: tuple[str, ...] = ("mnist", "fashion-mnist", "notmnist")
COVERS: tuple[str, ...] = ()
AVERAGING = tuple(name for name in methods.LABELS if name != "deterministic")
NOTES = (
    "All networks are LeNet-5 with BatchNorm, {setting epochs} passes each; the ensemble has "
    "{setting members} of them, and so as many times the training. Foreign images score by the "
    "predictive entropy, larger meaning foreign; FPR95 is the share of MNIST that is flagged where "
    "all but one in twenty of the foreign images are. Rotated digits are the test digits turned "
    "by 90°.",
    "The calibrated NLL is the test's at the temperature that fits the validation images best "
    "(Ashukha et al., 2020, fit it on halves of the test set); the prior of the Laplace "
    "approximation is chosen on these too. Nothing is chosen on foreign images.",
)


@dataclass(frozen=True, kw_only=True)
class Config(methods.Settings):
    """Four kinds of LeNet-5, eight networks in all; about 40 minutes of one core."""

    foreign_size: int = 10_000
    """Images of each foreign set, the first ones of its test part."""


QUICK = Config(**methods.QUICK, foreign_size=1000)
SMOKE = Config(**methods.SMOKE, foreign_size=100)
CLAIMS = [
    Claim(
        "gain.ensemble.nll",
        0.0,
        CHIRKOVA("ensembling: uncertainty estimation"),
        0.0,
        "at least",
        "negative log-likelihood that the deep ensemble saves next to one network",
        "nat",
    ),
    *(
        Claim(
            f"gain.{name}.auroc",
            0.0,
            MOLCHANOV("uncertainty estimation: out-of-domain data"),
            0.0,
            "at least",
            f"{methods.LABELS[name]}: AUROC above the deterministic network's, mean of the sets",
        )
        for name in AVERAGING
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    test = shared_networks.grey_images(config.data, "test", config.test_size, log)
    sets = {
        "validation": methods.validation_images(config, log),
        "test": test,
        **_foreign(config, test, log),
    }
    results: dict[str, Any] = {}
    for name, method in methods.methods(config, log):
        results[name] = log.once(f"measure {name}", partial(_measure, method, sets))
        log.metrics(method=name, **results[name])
    plain = results["deterministic"]
    results["gain"] = {
        name: {
            "nll": plain["nll"] - results[name]["nll"],
            "calibrated_nll": plain["calibrated_nll"] - results[name]["calibrated_nll"],
            "auroc": results[name]["auroc_mean"] - plain["auroc_mean"],
        }
        for name in AVERAGING
    }
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    runs = [
        {label: record["metrics"][name] for name, label in methods.LABELS.items()}
        for record in records
    ]
    foreign = list(runs[0]["deterministic"]["auroc"])

    def flat(key: str) -> list[dict[str, dict[str, Any]]]:
        return [{label: row[key] for label, row in run.items()} for run in runs]

    named = {name: name for name in foreign}
    log_losses = {"nll": "NLL", "calibrated_nll": "at the best temperature"}
    return [
        bars("Telling foreign images, AUROC", "method", named, flat("auroc"), y_label="AUROC"),
        bars(
            "MNIST that is flagged where 95% of the foreign are",
            "method",
            named,
            flat("fpr95"),
            y_label="share",
        ),
        bars("Negative log-likelihood of the test", "method", log_losses, runs, y_label="nat"),
        bars(
            "Calibration error, and errors over all coverages",
            "method",
            {"ece": "ECE", "aurc": "AURC"},
            runs,
            y_label="share",
        ),
    ]


def _foreign(config: Config, test: ImageSet, log: RunLog) -> dict[str, ImageSet]:
    turned = dataclasses.replace(test, images=test.images.rot90(1, (2, 3)).contiguous())
    if config.data == "digits":
        return {"rotated": turned, "inverted": dataclasses.replace(test, images=1 - test.images)}
    others = {
        name: shared_networks.grey_images(name, "test", config.foreign_size, log)
        for name in ("fashion-mnist", "notmnist")
    }
    return {**others, "rotated": turned}


def _measure(method: methods.Method, sets: Mapping[str, ImageSet]) -> dict[str, Any]:
    drawn = {
        name: method.samples(data, seed=number) for number, (name, data) in enumerate(sets.items())
    }
    labels, held_out = sets["test"].labels, sets["validation"].labels
    proba = drawn["test"].mean(0)
    calibration = drawn["validation"].mean(0), held_out
    scores = {name: _entropy(samples) for name, samples in drawn.items()}
    disagreement = {
        name: scores[name] - cross_entropy(samples, samples, "softmax", -1).mean(0)
        for name, samples in drawn.items()
    }
    foreign = [name for name in sets if name not in ("validation", "test")]
    auroc = {name: uncertainty.auroc(scores["test"], scores[name]) for name in foreign}
    measured: dict[str, Any] = {
        "accuracy": small_networks.accuracy(proba, labels),
        "nll": uncertainty.negative_log_likelihood(proba, labels),
        "calibrated_nll": -uncertainty.calibrated_log_likelihood(
            proba, labels, calibration=calibration
        ),
        "temperature": uncertainty.fit_temperature(*calibration),
        "ece": uncertainty.calibration_error(proba, labels),
        "brier": uncertainty.brier_score(proba, labels),
        "aurc": uncertainty.area_under_risk_coverage(proba, labels),
        "auroc": auroc,
        "auroc_mean": sum(auroc.values()) / len(auroc),
        "fpr95": {name: uncertainty.fpr95(scores["test"], scores[name]) for name in foreign},
    }
    if len(drawn["test"]) > 1:
        measured["auroc_disagreement"] = {
            name: uncertainty.auroc(disagreement["test"], disagreement[name]) for name in foreign
        }
    return measured


def _entropy(samples: Any) -> Any:
    average = samples.mean(0)
    return cross_entropy(average, average, "softmax", -1)
