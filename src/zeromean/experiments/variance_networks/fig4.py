"""Figure 4: the accuracy of single networks drawn from the posterior, and of averages of 200."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zeromean as zm
from zeromean.experiments.networks import evaluation
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.figure import figure, histogram
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import lenet

TITLE = "Figure 4: accuracy of one sample of the weights against averages of 200"
SOURCE = "Neklyudov et al. (2019), Figure 4"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("paper: Figure 4",)
VERSION = 2  # Trained on 55,000 images, the others being the validation set.


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """LeNet-5 with dense1 a variance layer."""

    draws: int = 200
    """Single networks that are drawn."""
    averages: int = 20
    """Averages that are taken."""
    samples_per_average: int = 200
    """Networks in each average."""


QUICK = Config(**lenet.QUICK, draws=50, averages=5, samples_per_average=50)
SMOKE = Config(**lenet.SMOKE, draws=5, averages=2, samples_per_average=5)
CLAIMS = [
    Claim(
        "worst_single",
        95.0,
        ours("section 6.1 says “relatively high”, without a number"),
        0.0,
        "at least",
        "accuracy of the worst single network",
        "%",
    ),
    Claim(
        "gain",
        0.0,
        PAPER("Figure 4"),
        0.0,
        "at least",
        "gain of averaging over single networks",
        "points",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    trained = lenet.train("zero-mean", lenet.Network(prior="log-uniform"), config, log)

    def accuracies(count: int, seed: int, average: bool) -> list[float]:
        proba = evaluation.sampled_probabilities(
            trained.model, trained.test, count, sampler=zm.weight, seed=seed
        )
        scores = proba.mean(0, keepdim=True) if average else proba
        correct = scores.argmax(-1) == trained.test.labels
        return (100 * correct.double().mean(-1)).tolist()

    # In small portions: all samples of all images would not fit into memory.
    single, averaged = [], []
    for start in range(0, config.draws, 50):
        count = min(50, config.draws - start)
        single += log.once(f"single {start}", lambda c=count, s=start: accuracies(c, s, False))
    for i in range(config.averages):
        averaged += log.once(
            f"average {i}",
            lambda i=i: accuracies(config.samples_per_average, 10_000 + i, True),
        )
    return {
        "single": single,
        "averaged": averaged,
        "single_mean": statistics.fmean(single),
        "averaged_mean": statistics.fmean(averaged),
        "worst_single": min(single),
        "gain": statistics.fmean(averaged) - statistics.fmean(single),
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    single = [value for record in records for value in record["metrics"]["single"]]
    averaged = [value for record in records for value in record["metrics"]["averaged"]]
    traces = [histogram("one sample", single), histogram("average", averaged)]
    return [figure("Test accuracy of networks from the posterior", "accuracy, %", "count", traces)]
