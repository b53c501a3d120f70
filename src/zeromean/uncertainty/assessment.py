"""A network's uncertainty in one table and one page."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from zeromean.arguments import require_integer, shown
from zeromean.prediction.classification import predict_proba, predictive_uncertainty
from zeromean.prediction.inputs import Inputs
from zeromean.prediction.probabilities import OutputKind, cross_entropy
from zeromean.prediction.regression import NoiseModel
from zeromean.prediction.sources import Source
from zeromean.text_table import text_table
from zeromean.uncertainty import plots
from zeromean.uncertainty.calibration import (
    calibrated_log_likelihood,
    calibration_error,
    fit_temperature,
    reliability,
)
from zeromean.uncertainty.detection import auroc, fpr95
from zeromean.uncertainty.mixture import GaussianMixture, predict_mixture
from zeromean.uncertainty.page import write_page
from zeromean.uncertainty.rejection import reject, risk_coverage
from zeromean.uncertainty.scores import accuracy, brier_score, negative_log_likelihood

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEANINGS = {
    "accuracy": "share of examples whose most probable class is their label",
    "NLL": "average of −log p(label) or of −log density, in nats; lower is better",
    "calibrated NLL": "the same at the temperature that fits held-out examples best",
    "temperature": "that temperature; above 1 the network is too sure",
    "ECE": "how far the highest probability is from how often it is right",
    "Brier score": "squared distance of the probabilities to the label, 0 to 2",
    "AURC": "errors among the surest examples, averaged over the share that is kept",
    "errors": "share of examples that are wrong",
    "errors in the surest 90%": "the same where the least sure tenth goes to a person",
    "RMSE": "root of the average squared error of the mean",
    "CRPS": "a mean absolute error for whole distributions, in the units of the target",
    "90% interval: inside": "share of targets in the central 90% interval; 0.9 is right",
    "90% interval: width": "its average width, in the units of the target",
    "AUROC": "how often a foreign input has the larger score than a known one; 0.5 is chance",
    "FPR95": "share of known inputs that are flagged where 95% of the foreign are",
}


@dataclass(frozen=True)
class UncertaintyReport:
    """What `report` found. `print` shows the table, `save` writes the page."""

    metrics: Mapping[str, Mapping[str, float]]
    """By network, and by the name of the metric."""
    num_examples: int
    draw: Callable[[], dict[str, Figure]] = field(repr=False)
    """Draws the figures of the page, by their titles; needs the extra `cli`."""

    def __str__(self) -> str:
        return "\n".join(text_table(self.rows()))

    def rows(self) -> list[list[str]]:
        """The table: a row a metric, a column a network."""
        names = list(self.metrics)
        keys = list(self.metrics[names[0]])
        header = [f"{self.num_examples:,} examples", *names]
        return [header] + [
            [key, *(f"{self.metrics[name][key]:.4f}" for name in names)] for key in keys
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML file that needs no other: the table, the figures, what they mean."""
        used = {key for each in self.metrics.values() for key in each}
        meanings = {
            name: text for name, text in MEANINGS.items() if any(k.startswith(name) for k in used)
        }
        write_page(path, self.rows(), self.draw(), meanings)


def report(
    model: Source | Mapping[str, Source],
    data: Any,
    *,
    foreign: Inputs | Mapping[str, Any] | None = None,
    calibration: Any = None,
    likelihood: NoiseModel | None = None,
    num_samples: int = 50,
    outputs: OutputKind | None = None,
    seed: int = 0,
    batch_size: int = 500,
) -> UncertaintyReport:
    """How good a network's uncertainty is: one table, and one page with pictures.

    Classes where the targets are whole numbers, else a regression.

    Args:
        model: One network, several as an ensemble, `zm.States`; or a mapping from names to these,
            to compare them.
        data: `(inputs, targets)`, a data set with `images` and `labels`, or a DataLoader that gives
            both in a fixed order.
        foreign: Inputs unlike the data, or several kinds by name, scored by the predictive entropy
            or variance.
        calibration: Like `data`, to fit the temperature on. Default: halves of `data`.
        likelihood: That of the training, for a regression.
        num_samples: Draws of the noise.
        outputs: "logits" or "probabilities": what the model returns, as of `zm.predict_proba`.
        seed: Of the noise.
        batch_size: Examples that run at once.
    """
    models: Mapping[Any, Any] = model if isinstance(model, Mapping) else {"value": model}
    if not models:
        raise ValueError("A report needs at least one network, got an empty mapping.")
    require_integer("num_samples", num_samples, at_least=1)
    inputs, targets = _pair("data", data)
    held_out = None if calibration is None else _pair("calibration", calibration)
    given = foreign if isinstance(foreign, Mapping) else {"foreign": foreign}
    others = {name: each for name, each in given.items() if each is not None}
    common: dict[str, Any] = {"seed": seed, "batch_size": batch_size}
    if targets.is_floating_point():
        if held_out is not None:
            raise ValueError("A regression has no temperature to fit; leave calibration= out.")
        mixtures = {
            name: predict_mixture(each, inputs, num_samples, likelihood=likelihood, **common)
            for name, each in models.items()
        }
        scores = {
            name: {
                kind: predict_mixture(
                    each, other, num_samples, likelihood=likelihood, **common
                ).variance.flatten()
                for kind, other in others.items()
            }
            for name, each in models.items()
        }
        return _of_regression(mixtures, targets, scores)
    common["outputs"] = outputs
    probabilities = {
        name: predict_proba(each, inputs, num_samples, **common) for name, each in models.items()
    }
    known = None
    if held_out is not None:
        known = {
            name: (predict_proba(each, held_out[0], num_samples, **common), held_out[1])
            for name, each in models.items()
        }
    scores = {
        name: {
            kind: predictive_uncertainty(each, other, num_samples, **common).predictive_entropy
            for kind, other in others.items()
        }
        for name, each in models.items()
    }
    return _of_classes(probabilities, targets, scores, known)


def _of_classes(
    probabilities: Mapping[str, Tensor],
    labels: Tensor,
    scores: Mapping[str, Mapping[str, Tensor]],
    calibration: Mapping[str, tuple[Tensor, Tensor]] | None,
) -> UncertaintyReport:
    metrics = {}
    own = {}
    for name, proba in probabilities.items():
        held_out = None if calibration is None else calibration[name]
        own[name] = cross_entropy(proba, proba, "softmax", -1)
        kept = ~reject(proba, coverage=0.9).rejected.cpu()
        metrics[name] = {
            "accuracy": accuracy(proba, labels),
            "NLL": negative_log_likelihood(proba, labels),
            "calibrated NLL": -calibrated_log_likelihood(proba, labels, calibration=held_out),
            "temperature": fit_temperature(*(held_out or (proba, labels))),
            "ECE": calibration_error(proba, labels),
            "Brier score": brier_score(proba, labels),
            "AURC": risk_coverage(proba, labels).area,
            "errors": 1 - accuracy(proba, labels),
            "errors in the surest 90%": 1 - accuracy(proba[kept], labels[kept]),
            **_detection(own[name], scores[name]),
        }

    def draw() -> dict[str, Figure]:
        bins = {name: reliability(proba, labels) for name, proba in probabilities.items()}
        curves = {name: risk_coverage(proba, labels) for name, proba in probabilities.items()}
        return {
            "Reliability: right where it should be on the dotted line": plots.plot_reliability(
                bins
            ),
            "Risk and coverage": plots.plot_risk_coverage(curves),
            **_score_plots("Predictive entropy", own, scores),
        }

    return UncertaintyReport(metrics, len(labels), draw)


def _of_regression(
    mixtures: Mapping[str, GaussianMixture],
    targets: Tensor,
    scores: Mapping[str, Mapping[str, Tensor]],
) -> UncertaintyReport:
    metrics = {}
    for name, mixture in mixtures.items():
        interval = mixture.interval(0.9)
        errors = mixture.mean - targets.double().cpu()
        metrics[name] = {
            "RMSE": errors.square().mean().sqrt().item(),
            "NLL": -mixture.log_density(targets).mean().item(),
            "CRPS": mixture.crps(targets).mean().item(),
            "90% interval: inside": interval.coverage(targets),
            "90% interval: width": interval.width.mean().item(),
            **_detection(mixture.variance.flatten(), scores[name]),
        }
    own = {name: mixture.variance.flatten() for name, mixture in mixtures.items()}

    def draw() -> dict[str, Figure]:
        of_all = _by_name(mixtures)
        drawn = {"Coverage: right on the dotted line": plots.plot_coverage(of_all, targets)}
        for name, mixture in mixtures.items():
            of = "" if len(mixtures) == 1 else f" ({name})"
            drawn[f"90% intervals{of}"] = plots.plot_intervals(mixture.interval(0.9), targets)
            drawn[f"Probability integral transform{of}"] = plots.plot_pit(mixture.cdf(targets))
        return {**drawn, **_score_plots("Predictive variance", own, scores)}

    return UncertaintyReport(metrics, len(targets), draw)


def _detection(own: Tensor, foreign: Mapping[str, Tensor]) -> dict[str, float]:
    found = {}
    for kind, scores in foreign.items():
        found[f"AUROC, {kind}"] = auroc(own, scores)
        found[f"FPR95, {kind}"] = fpr95(own, scores)
    return found


def _score_plots(
    title: str, own: Mapping[str, Tensor], foreign: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Figure]:
    return {
        title + ("" if len(own) == 1 else f" ({name})"): plots.plot_scores(own[name], scores)
        for name, scores in foreign.items()
        if scores
    }


def _by_name(values: Mapping[str, Any]) -> Any:
    """What a plot needs no legend for, where there is one network."""
    return next(iter(values.values())) if len(values) == 1 else values


def _pair(name: str, data: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets in memory."""
    if isinstance(data, DataLoader):
        batches = [_pair(f"a batch of {name}", batch) for batch in data]
        if not batches:
            raise ValueError(f"{name} must have at least one example, got an empty DataLoader.")
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return inputs, targets
    if hasattr(data, "images") and hasattr(data, "labels"):
        data = data.images, data.labels
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise TypeError(f"{name} must be (inputs, targets) or a DataLoader, got {shown(data)}.")
    inputs, targets = (torch.as_tensor(part) for part in data)
    if len(inputs) != len(targets):
        raise ValueError(
            f"{name} must have one target for each input, got {len(inputs)} inputs and "
            f"{len(targets)} targets."
        )
    if not len(inputs):
        raise ValueError(f"{name} must have at least one example, got none.")
    return inputs, targets
