"""Table 1, the rows of CIFAR-10: the ELBO of three parameterizations of a VGG-like network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import zeromean as zm
from zeromean.experiments.networks import cifar
from zeromean.experiments.networks.evaluation import log_likelihood
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER
from zeromean.experiments.runs.figure import bars, figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import vgg

TITLE = "Table 1 (CIFAR-10): the ELBO of a VGG by layer, neuron and weight"
SOURCE = "Neklyudov et al. (2019), Table 1 and section 5"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS = ("paper: Table 1 on CIFAR-10",)
TABLE = {"layer": -116.2, "neuron": -233.4, "weight": -1453.7}
TERMS = {"elbo": "ELBO", "data_term": "data term", "kl": "KL term"}
NOTES = (
    vgg.RECIPE,
    "Labels are not smoothed here, so that the bound is what is maximized. It is evaluated on the "
    "training images as they are, in their order, with ten samples of the noise. The log-uniform "
    "prior is improper: its bound compares networks of one size, so the paper's values, of the "
    "full width, stand next to ours for their order alone.",
)


@dataclass(frozen=True, kw_only=True)
class Config(cifar.Settings):
    """Three networks at a quarter of the width.

    2.6 minutes of one core a pass in float32, 1.8 hours for each.
    """

    epochs: int = 40
    """Passes over the training set. The paper has 550, by Adam."""
    width: float = 0.25
    """Width of the network, in parts of the paper's."""
    dropout: float = 0.0
    """Factor of the network's drop rates; 0 for none."""
    label_smoothing: float = 0.0
    """Part of every label that goes to all classes alike."""


QUICK = Config(**cifar.QUICK)
SMOKE = Config(**cifar.SMOKE)
CLAIMS = [
    Claim("paper_order", 1.0, PAPER("Table 1"), label="layer > neuron > weight, by ELBO"),
    *(
        Claim(
            f"{name}.elbo",
            value,
            PAPER("Table 1"),
            0.5 * abs(value),
            label=f"{name}: ELBO, there at full width",
            unit="nat",
        )
        for name, value in TABLE.items()
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    results: dict[str, Any] = {"bits": cifar.bits(config)}
    for name in TABLE:
        network = replace(cifar.VARIANCE, posterior=name)
        row, trained = cifar.train_and_measure(name, network, config, log)
        results[name] = row | log.once(f"bound {name}", partial(_bound, trained))
    elbos = [results[name]["elbo"] for name in TABLE]
    results["paper_order"] = float(elbos == sorted(elbos, reverse=True))
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    names = list(TABLE)
    values = {key: [[abs(m[name][key]) for name in names] for m in metrics] for key in TERMS}
    terms = [over_seeds(label, names, values[key], kind="bar") for key, label in TERMS.items()]
    labels = {f"accuracy_{key}": label for key, label in vgg.PREDICTIONS.items()}
    return [
        figure("ELBO and its terms", "α by", "nat, absolute value", terms, y_log=True),
        bars("Test accuracy", "α by", labels, [{n: m[n] for n in names} for m in metrics]),
        *(vgg.log_alpha_figure([m[name] for m in metrics], f"log α, by {name}") for name in names),
    ]


@torch.no_grad()
def _bound(trained: cifar.Trained) -> dict[str, float]:
    data_term = log_likelihood(trained.model, trained.train)
    kl = zm.kl_divergence(trained.model).item()
    return {"elbo": data_term - kl, "data_term": data_term, "kl": kl}
