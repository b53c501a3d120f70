"""Table 1: the ELBO of five parameterizations of the posterior of LeNet-5's big dense layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import zeromean as zm
from zeromean.experiments import lenet
from zeromean.experiments.claims import Claim
from zeromean.experiments.figure import bars, figure, histogram, over_seeds
from zeromean.experiments.run_log import RunLog

TITLE = "Table 1: a less flexible posterior reaches a better ELBO"
SOURCE = "Neklyudov et al. (2019), Table 1 and section 5"
NEEDS: tuple[str, ...] = ("mnist",)
PARAMETERIZATIONS = ("zero-mean", "layer", "neuron", "weight", "additive")
ORDER = ("zero-mean", "layer", "neuron", "additive", "weight")
PAPER = {  # ELBO, data term, KL, mean propagation, test-time averaging
    "zero-mean": (-4.0, -4.0, 0.0, 11.3, 99.4),
    "layer": (-17.4, -15.8, 1.7, 11.3, 99.2),
    "neuron": (-31.4, -17.0, 14.4, 11.3, 99.2),
    "weight": (-602.6, -33.8, 568.8, 96.6, 99.4),
    "additive": (-227.9, -31.2, 196.7, 99.2, 99.2),
}
NOTES = (
    "The order is the paper's, from one seed: zero-mean and layer are close, the others apart by "
    "factors. Absolute values differ: the layer-wise posterior ends with log α = 15.2 and a KL of "
    "0.05, where the paper's 1.7 nat are log α = 11.7. We train log α at ten times the paper's "
    "rate, so that it has longer to rise.",
    "Neuron, weight and additive were trained for 60 passes and not 200: their data terms, twice "
    "the paper's, are those of a shorter training. The rate for log α by neuron is three times "
    "that of the others. We chose it after a first run with theirs, in which mean propagation had "
    "not collapsed by the end. After 60 passes it is right about 25 images more than a constant "
    "class; after 100, in a run of its own above, about none, and the ELBO is better than the "
    "paper's. The order stays.",
    "“Stuck” is a matter of degree. Of the additive posterior's weights 0.3% keep α below e³, of "
    "the weight-wise one's 0.002%; but as the histogram of 2,000 weights shows, the latter stay "
    "far below the log α of the layer-wise posterior, and many small terms add up to 304 nat.",
)


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """LeNet-5 with one stochastic layer, dense1."""

    parameterizations: tuple[str, ...] = PARAMETERIZATIONS
    """Which ones to train: zero-mean, layer, neuron, weight, additive."""
    short_epochs: int = 60
    """At most so many passes for neuron, weight and additive."""
    neuron_log_alpha_lr: float = 0.03
    """Adam's learning rate for log α by neuron: that of the others leaves some neurons their
    means."""


QUICK = Config(**lenet.QUICK, neuron_log_alpha_lr=0.1)
SMOKE = Config(**lenet.SMOKE)


def _claims() -> list[Claim]:
    claims = [
        Claim(
            "paper_order",
            1.0,
            "section 5",
            label="zero-mean > layer > neuron > additive > weight, by ELBO",
        )
    ]
    for name, (elbo, data_term, kl, mean, averaged) in PAPER.items():
        # The poster's figures differ from the paper's by half: that is the run-to-run spread.
        claims += [
            Claim(f"{name}.elbo", elbo, "Table 1", 0.5 * abs(elbo), label=f"{name}: ELBO"),
            Claim(
                f"{name}.data_term",
                data_term,
                "Table 1",
                0.5 * abs(data_term),
                label=f"{name}: data term",
            ),
            Claim(f"{name}.kl", kl, "Table 1", 0.5 * kl, label=f"{name}: KL term"),
            Claim(
                f"{name}.accuracy_averaged",
                averaged,
                "Table 1",
                0.15,
                "at least",
                label=f"{name}: test-time averaging",
                unit="%",
            ),
        ]
        if mean == lenet.CONSTANT_CLASS:
            claims.append(lenet.means_know_nothing(name, "Table 1"))
        else:
            claims.append(
                Claim(
                    f"{name}.accuracy_mean",
                    mean,
                    "Table 1",
                    0.5,
                    label=f"{name}: mean propagation",
                    unit="%",
                )
            )
    return claims


CLAIMS = _claims()


def run(config: Config, log: RunLog) -> dict[str, Any]:
    unknown = [p for p in config.parameterizations if p not in PARAMETERIZATIONS]
    if unknown:
        raise ValueError(
            f"there is no parameterization {unknown[0]!r}; choose from "
            f"{', '.join(PARAMETERIZATIONS)}."
        )
    networks = {
        name: lenet.Network(posterior=name, prior="log-uniform")
        for name in config.parameterizations
    }
    short = lenet.at_most(config, config.short_epochs)
    schedules = {
        "neuron": replace(short, log_alpha_lr=config.neuron_log_alpha_lr),
        "weight": short,
        "additive": short,
    }
    results = {}
    for name, network in networks.items():
        settings = schedules.get(name, config)
        results[name] = lenet.train_and_measure(name, network, settings, log)
        if name in ("weight", "additive"):
            trained = lenet.train(name, network, settings, log)
            results[name]["log_alpha_sample"] = _log_alpha_sample(trained.model)
            results[name]["stuck_share"] = _stuck_share(trained.model)
    if set(ORDER) <= set(results):
        elbos = [results[name]["elbo"] for name in ORDER]
        results["paper_order"] = float(elbos == sorted(elbos, reverse=True))
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    names = [name for name in PARAMETERIZATIONS if name in metrics[0]]
    terms = {"elbo": "ELBO", "data_term": "data term", "kl": "KL", "kl_approx": "KL, approximate"}
    drawn = [
        figure(
            "ELBO and its terms",
            "parameterization",
            "nat, absolute value",
            [
                over_seeds(
                    label, names, [[abs(m[n][key]) for n in names] for m in metrics], kind="bar"
                )
                for key, label in terms.items()
            ],
            y_log=True,
        ),
        bars(
            "Test accuracy",
            "parameterization",
            {"accuracy_mean": "mean propagation", "accuracy_averaged": "averaged"},
            [{name: m[name] for name in names} for m in metrics],
        ),
    ]
    histograms = [
        histogram(name, metrics[0][name]["log_alpha_sample"])
        for name in ("weight", "additive")
        if name in names
    ]
    if histograms:
        drawn.append(
            figure(
                "log α of single weights, by weight and additive",
                "log α",
                "weights, of 2,000",
                histograms,
            )
        )
    return drawn


@torch.no_grad()
def _log_alpha_sample(model: Any) -> list[float]:
    """log α of 2,000 weights, spread evenly."""
    values = _log_alpha(model)
    return values[:: max(1, len(values) // 2000)].clamp(-20, 30).tolist()


@torch.no_grad()
def _stuck_share(model: Any) -> float:
    """Share of weights with α below e³, which are not noise alone."""
    return (_log_alpha(model) < 3).double().mean().item()


def _log_alpha(model: Any) -> torch.Tensor:
    return zm.stochastic_layers(model)["dense1"].weight.log_alpha_per_weight().flatten()
