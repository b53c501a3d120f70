"""Post-linear Gaussian dropout: noise drawn behind the product instead of in front of it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import cifar
from zeromean.experiments.networks.evaluation import accuracy
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import TALK
from zeromean.experiments.runs.figure import bars, figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import kingma

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Gaussian dropout behind the product: speed, gradient variance, train/test gap on CIFAR-10"
SOURCE = "Molchanov & Ashuha (2016), talk, “Post-linear Gaussian Dropout”"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS = ("talk: post-linear Gaussian dropout",)
TIMINGS = ("step.*", "times_faster")
WEIGHTS = ("linear.weight", "weight.mean")
KINDS = {"pre": "noise on inputs", "post": "noise on outputs"}
NOTES = (
    "Both networks have three hidden layers, the same fixed noise of a drop rate of {setting p} "
    "in front of every layer, and the same training. Noise on inputs is one draw for a unit, "
    "shared by all outputs; noise on outputs has the same mean and variance for each output, "
    "drawn for each by itself. That takes a second product, of squares, in place of fewer draws: "
    "on this machine a step takes {step.pre} ms with noise on inputs and {step.post} ms with "
    "noise on outputs. Gradient variances are of the same network, the one trained with noise on "
    "inputs, and the same mini-batch.",
)


@dataclass(frozen=True, kw_only=True)
class Config(kingma.Dense):
    """Two networks.

    0.9 minutes of one core a pass in float32, 20 minutes for each.
    """

    epochs: int = 20
    """Passes over the training set."""
    p: float = 0.5
    """Drop rate of binary dropout with the same variance."""
    draws: int = 100
    """Draws of the noise for the variance of a gradient."""
    repeats: int = 15
    """Pairs of steps that are timed."""


QUICK = Config(**kingma.QUICK_SIZES, draws=30)
SMOKE = Config(**cifar.SMOKE, draws=5, repeats=3)
CLAIMS = [
    Claim(
        metric,
        bound,
        TALK("“Post-linear Gaussian Dropout”"),
        0.0,
        "at least",
        label,
        unit,
        statistic,
    )
    for metric, bound, label, unit, statistic in (
        ("times_faster", 1.0, "a training step is faster with noise on outputs", "×", "median"),
        ("variance_ratio", 1.0, "gradient variance, noise on inputs over outputs", "×", "mean"),
        ("more_overfitting", 0.0, "train/test gap, noise on outputs over inputs", "points", "mean"),
    )
]  # fmt: skip


class PreLinear(nn.Sequential):
    """A linear map of inputs that Gaussian dropout has multiplied."""

    def __init__(self, in_features: int, out_features: int, p: float):
        super().__init__()
        self.dropout = zm.GaussianDropout(in_features, p, learn=False)
        self.linear = nn.Linear(in_features, out_features)


def run(config: Config, log: RunLog) -> dict[str, Any]:
    results: dict[str, Any] = {"bits": cifar.bits(config)}
    networks = {}
    for kind in KINDS:
        trained = kingma.train(
            f"{kind}-linear", {"p": config.p}, partial(_layer, kind, config.p), config, log
        )
        networks[kind] = trained
        results[kind] = log.once(f"measure {kind}", partial(_measure, trained, config))
        results[kind]["test_by_epoch"] = [row["accuracy_mean"] for row in trained.history]
    results["more_overfitting"] = results["post"]["gap"] - results["pre"]["gap"]
    results |= log.once("gradients", partial(_gradients, networks, config))
    return results | log.once("speed", partial(_speed, networks, config))


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    rows = [{words: m[kind] for kind, words in KINDS.items()} for m in metrics]
    labels = {"train_accuracy": "training images", "accuracy_mean": "test images"}
    passes = list(range(1, len(metrics[0]["pre"]["test_by_epoch"]) + 1))
    curves = [
        over_seeds(words, passes, [m[kind]["test_by_epoch"] for m in metrics])
        for kind, words in KINDS.items()
    ]
    layers = list(metrics[0]["gradient_variance"]["pre"])
    noise = [
        over_seeds(
            words,
            layers,
            [[m["gradient_variance"][kind][layer] for layer in layers] for m in metrics],
            kind="bar",
        )
        for kind, words in KINDS.items()
    ]
    return [
        bars("Accuracy of the means", "", labels, rows),
        figure("By pass", "pass", "accuracy of the means on validation images, %", curves),
        figure("Variance of the gradient", "layer", "summed over weights", noise, y_log=True),
    ]


def _layer(kind: str, p: float, in_features: int, out_features: int) -> nn.Module:
    if kind == "pre":
        return PreLinear(in_features, out_features, p)
    posterior = partial(zm.Multiplicative, log_alpha=math.log(p / (1 - p)))
    layer = zm.Linear(in_features, out_features, posterior=posterior, prior=None)
    layer.weight.log_alpha.requires_grad_(False)
    return layer


def _measure(trained: cifar.Trained, config: Config) -> dict[str, float]:
    few = trained.train.subset(torch.arange(min(config.test_size, len(trained.train))))
    row = cifar.measure(trained, config)
    row["train_accuracy"] = accuracy(trained.model, few, 1, sampler=zm.mean)
    row["gap"] = row["train_accuracy"] - row["accuracy_mean"]
    return row


def _steps(
    networks: Mapping[str, cifar.Trained], config: Config
) -> dict[str, tuple[Callable[[], None], list[nn.Parameter]]]:
    """Both kinds of network with the weights of one, and what computes their gradients once."""
    pre, post = networks["pre"].model, networks["post"].model
    state = post.state_dict()
    for name, value in pre.state_dict().items():
        key = name.replace(".linear.weight", ".weight.mean").replace(".linear.bias", ".bias")
        if key in state:
            state[key] = value
    post.load_state_dict(state)
    data: ImageSet = networks["pre"].train
    images, labels = data.images[: config.batch_size], data.labels[: config.batch_size]

    def step(model: nn.Module) -> None:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()

    return {
        kind: (
            partial(step, model),
            [p for n, p in model.named_parameters() if n.endswith(WEIGHTS)],
        )
        for kind, model in (("pre", pre), ("post", post))
    }


def _gradients(networks: Mapping[str, cifar.Trained], config: Config) -> dict[str, Any]:
    """Variance over the noise of the gradient of every weight, summed by layer."""
    found: dict[str, dict[str, float]] = {}
    for kind, (step, weights) in _steps(networks, config).items():
        sums = [torch.zeros_like(w, dtype=torch.float64) for w in weights]
        squares = [torch.zeros_like(s) for s in sums]
        for _ in range(config.draws):
            step()
            for total, square, weight in zip(sums, squares, weights, strict=True):
                assert weight.grad is not None
                total += weight.grad
                square += weight.grad.double().square()
        found[kind] = {
            f"dense{i}": (
                (square - total.square() / config.draws).sum() / (config.draws - 1)
            ).item()
            for i, (total, square) in enumerate(zip(sums, squares, strict=True), start=1)
        }
    totals = {kind: sum(layers.values()) for kind, layers in found.items()}
    return {"gradient_variance": found, "variance_ratio": totals["pre"] / totals["post"]}


def _speed(networks: Mapping[str, cifar.Trained], config: Config) -> dict[str, Any]:
    """Median CPU time of forward and backward passes, the two kinds in turn."""
    steps = {kind: step for kind, (step, _) in _steps(networks, config).items()}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for repeat in range(config.repeats + 1):
        for kind, step in steps.items():
            start = time.process_time()
            step()
            if repeat:  # The first one allocates.
                times[kind].append(time.process_time() - start)
    ratios = [a / b for a, b in zip(times["pre"], times["post"], strict=True)]
    milliseconds = {kind: 1e3 * statistics.median(each) for kind, each in times.items()}
    return {"step": milliseconds, "times_faster": statistics.median(ratios)}
