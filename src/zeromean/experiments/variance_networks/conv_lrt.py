"""Convolutions: local reparameterization, which is not exact there, against weight sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zeromean as zm
from zeromean.experiments.networks import evaluation
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import MOLCHANOV
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import lenet

TITLE = "A convolutional variance layer: LRT against exact weight sampling"
SOURCE = "Neklyudov et al. (2019), Appendix E; Molchanov, lecture: LRT for convolutions"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("paper: Appendix E", "molchanov: LRT for convolutions")
VERSION = 2  # Trained on 55,000 images, the others being the validation set.
SAMPLERS = {"LRT": "local", "weight": "weight"}


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """LeNet-5 with conv2 a variance layer, trained in two ways and evaluated in two ways."""

    epochs: int = 12
    """Passes over the training set. The paper has 200; the accuracies have their plateau before."""


QUICK = Config(**lenet.QUICK)
SMOKE = Config(**lenet.SMOKE)
CLAIMS = [
    Claim(
        "gain",
        0.0,
        MOLCHANOV("LRT for convolutions, “much better than plain reparameterization”"),
        0.0,
        "at least",
        "averaged accuracy, trained with LRT less trained with weight sampling",
        "points",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, sampler in SAMPLERS.items():
        network = lenet.Network(layers=("conv2",), prior="log-uniform", sampler=sampler)
        trained = lenet.train(name, network, config, log)
        results[name] = {"data_term": evaluation.log_likelihood(trained.model, trained.train)}
        for key, evaluated in (("LRT", zm.local), ("weight", zm.weight)):
            for count in (1, config.num_samples):
                label = "accuracy_1" if count == 1 else "accuracy_averaged"
                results[name][f"{label}.{key}"] = evaluation.accuracy(
                    trained.model, trained.test, count, sampler=evaluated, seed=0
                )
    # Each evaluated in the way in which it was trained.
    results["gain"] = (
        results["LRT"]["accuracy_averaged.LRT"] - results["weight"]["accuracy_averaged.weight"]
    )
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    traces = [
        over_seeds(
            f"evaluated with {evaluated}, {how}",
            [f"trained with {name}" for name in SAMPLERS],
            [[m[name][f"{key}.{evaluated}"] for name in SAMPLERS] for m in metrics],
            kind="bar",
        )
        for evaluated in SAMPLERS
        for key, how in (("accuracy_1", "one sample"), ("accuracy_averaged", "averaged"))
    ]
    return [figure("Test accuracy with conv2 a variance layer", "network", "accuracy, %", traces)]
