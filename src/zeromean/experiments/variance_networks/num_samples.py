"""Accuracy and negative log-likelihood against the number of samples in the average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeromean.experiments.networks import evaluation, small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import CHIRKOVA, PAPER, ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import lenet

TITLE = "Accuracy and NLL of a variance network against the number of samples"
SOURCE = "Neklyudov et al. (2019), section 3.3; Chirkova, lecture: ensembling"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("chirkova: ensembling",)
VERSION = 2  # Trained on 55,000 images, the others being the validation set.
STEPS = (1, 2, 3, 5, 10, 20, 50, 100, 200)


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """LeNet-5 with dense1 a variance layer."""

    most: int = 200
    """Samples in the largest average."""


QUICK = Config(**lenet.QUICK, most=50)
SMOKE = Config(**lenet.SMOKE, most=5)
CLAIMS = [
    lenet.as_accurate(
        "accuracy_1",
        98.2,
        ours("what the paper's Table 2 has for another network, with four stochastic layers"),
        "one sample",
    ),
    Claim("accuracy_20", 99.3, PAPER("section 3.3"), 0.15, "at least", "20 samples", "%"),
    Claim(
        "nll_gain",
        0.0,
        CHIRKOVA("ensembling, “keeps improving”"),
        0.0,
        "at least",
        "negative log-likelihood saved by averaging",
        "nat",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    if config.most < 1:
        raise ValueError(f"most must be at least 1, got {config.most}.")
    trained = lenet.train("zero-mean", lenet.Network(prior="log-uniform"), config, log)
    rows = log.once("curve", lambda: _curve(trained, config.most))
    at = {row["num_samples"]: row for row in rows}
    return {
        "rows": rows,
        "accuracy_1": rows[0]["accuracy"],
        "accuracy_20": at[20]["accuracy"] if 20 in at else None,
        "nll_1": rows[0]["nll"],
        "nll_most": rows[-1]["nll"],
        "nll_gain": rows[0]["nll"] - rows[-1]["nll"],
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    runs = [record["metrics"]["rows"] for record in records]
    steps = [row["num_samples"] for row in runs[0]]
    return [
        figure(
            title,
            "samples in the average",
            label,
            [over_seeds("zero-mean", steps, [[row[key] for row in rows] for rows in runs])],
            x_log=True,
        )
        for key, title, label in (
            ("accuracy", "Test accuracy", "accuracy, %"),
            ("nll", "Negative log-likelihood", "nat an image"),
        )
    ]


def _curve(trained: lenet.Trained, most: int) -> list[dict[str, float]]:
    rows = []
    total = 0.0
    labels = trained.test.labels
    done = 0
    for step in [s for s in STEPS if s < most] + [most]:
        drawn = evaluation.sampled_probabilities(
            trained.model, trained.test, step - done, seed=done
        )
        total = total + drawn.double().sum(0)
        done = step
        proba = total / done
        chosen = proba.gather(1, labels.unsqueeze(1)).clamp_min(1e-30)
        rows.append(
            {
                "num_samples": done,
                "accuracy": small_networks.accuracy(proba, labels),
                "nll": -chosen.log().mean().item(),
            }
        )
    return rows
