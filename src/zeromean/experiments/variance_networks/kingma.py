"""Kingma's set-up, as the talk takes it up: does α stop at its bound, and what without one?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

import zeromean as zm
from zeromean.experiments.networks import cifar
from zeromean.experiments.networks.evaluation import log_alphas
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import TALK, ours
from zeromean.experiments.runs.figure import bars, figure, over_seeds
from zeromean.experiments.runs.log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Kingma's set-up: α of three dense layers of 1,000 on CIFAR-10, with and without a bound"
SOURCE = "Molchanov & Ashuha (2016), talk, “Kingma's experiments”; Kingma et al. (2015)"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS = ("talk: layer case, 3FC(1000) on CIFAR", "talk: can we remove the boundaries?")
# Bounds of log α and the weight of the KL term: α ≤ 1, none, and Kingma's third of the KL.
VARIANTS: dict[str, tuple[tuple[float, float], float]] = {
    "bounded": ((-20.0, 0.0), 1.0),
    "unbounded": (cifar.BOUNDS, 1.0),
    "third": ((-20.0, 0.0), 1 / 3),
}
WORDS = {"bounded": "α ≤ 1", "unbounded": "no bound", "third": "α ≤ 1, a third of the KL"}
HIDDEN, LAYERS = 1000, 3
# α counts as at its bound of 1 from here on.
AT_BOUND = 0.99
# Part of the training, its end, over which α must stay where it is to be called stable.
END = 0.2
NOTES = (
    "The talk has no numbers: it says that α is at its bound after few iterations, that quality "
    "is much worse without a bound, and asks whether α stabilizes. Here the rates are constant, "
    "so that α does not stand still for want of a rate, and accuracies are those of a moving "
    "average of the weights. By Adam log α cannot rise faster than its rate of {setting "
    "log_alpha_lr} a step; from {setting log_alpha} to the bound that takes several hundred steps "
    "at the least, and it takes {bounded.iterations_to_bound} of them until all layers are there "
    "({third.iterations_to_bound} with a third of the KL; a run that does not get there counts "
    "with all its steps).",
    "Without a bound the mean of log α over the layers ends at {unbounded.log_alpha_mean}, and "
    "moves by {unbounded.drift} in the last fifth of the training.",
)


@dataclass(frozen=True, kw_only=True)
class Dense(cifar.Settings):
    """Three hidden dense layers on CIFAR-10, by Adam, on images as they are."""

    epochs: int = 30
    """Passes over the training set."""
    lr: float = 1e-3
    """Adam's rate."""
    weight_decay: float = 0.0
    """L2 penalty on deterministic weights and on means."""
    label_smoothing: float = 0.0
    """Part of every label that goes to all classes alike."""
    log_alpha_lr: float = 0.01
    """Adam's rate for log α."""
    log_alpha_beta2: float = 0.999
    """Adam's β₂ for the same."""
    batch_size: int = 100
    """Images in a mini-batch."""
    every: int = 10
    """Steps between two readings of α."""


@dataclass(frozen=True, kw_only=True)
class Config(Dense):
    """Three networks.

    0.9 minutes of one core a pass in float32, half an hour for each.
    """

    log_alpha: float = -3.0
    """log α at the start."""


SIZES = ("epochs", "train_size", "test_size", "look_size")
QUICK_SIZES: dict[str, Any] = {
    **{name: cifar.QUICK[name] for name in SIZES},
    "width": 0.2,
    "log_alpha_lr": 0.03,
}
QUICK = Config(**QUICK_SIZES)
SMOKE = Config(**cifar.SMOKE, every=1)
CLAIMS = [
    Claim(
        "bounded.alpha_mean",
        1.0,
        TALK("“α = 1.0 after few iterations”"),
        0.01,
        label="α in the mean over layers, bounded at 1",
    ),
    Claim(
        "bounded.passes_to_bound",
        2.0,
        ours("“few iterations” of the talk, in passes over the training set"),
        0.0,
        "at most",
        "passes until α of all layers is at the bound",
    ),
    Claim(
        "lost_without_bound",
        0.0,
        TALK("“the quality becomes much worse”"),
        0.0,
        "at least",
        "accuracy lost without the bound, 20 samples",
        "points",
    ),
    Claim(
        "unbounded.drift",
        0.0,
        ours("what we call stable; the talk asks and does not answer"),
        0.5,
        "equal",
        "change of log α in the last fifth of the training, no bound",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    results: dict[str, Any] = {"bits": cifar.bits(config)}
    for name, (bounds, beta) in VARIANTS.items():
        layer = partial(
            zm.Linear,
            posterior=partial(zm.Multiplicative, log_alpha=config.log_alpha),
            prior=zm.LogUniform(),
        )
        trained = train(
            name, {"log_alpha": config.log_alpha}, layer, config, log,
            clip_log_alpha=bounds, beta=beta,
        )  # fmt: skip
        measured = log.once(f"measure {name}", partial(cifar.measure, trained, config))
        results[name] = {**measured, **_rise(trained.history, config.epochs)}
    kept, lost = (results[name]["accuracy_averaged"] for name in ("bounded", "unbounded"))
    results["lost_without_bound"] = kept - lost
    return results


def train(
    name: str,
    identity: Mapping[str, Any],
    layer: Callable[..., nn.Module],
    config: Dense,
    log: RunLog,
    **options: Any,
) -> cifar.Trained:
    """Train the network of dense layers, with α by iteration in its history."""
    from zeromean.models import mlp

    hidden = max(1, round(HIDDEN * config.width))

    def build(images: Any, num_classes: int) -> nn.Module:
        return mlp((images[0].numel(), *[hidden] * LAYERS, num_classes), layer)

    readings, watch = _by_iteration(config.every)
    known = {"network": ["dense", name, hidden], "every": config.every, **identity}
    constant = {"optimizer": "adam", "decay": "constant", "average_epochs": 1.0}
    return cifar.train_any(
        name,
        known,
        build,
        config,
        log,
        watch=watch,
        augment=False,
        callbacks=[readings],
        **constant,
        **options,
    )


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    labels = {"accuracy_1": "one sample", "accuracy_mean": "means", "accuracy_averaged": "averaged"}
    rows = [{WORDS[name]: m[name] for name in VARIANTS} for m in metrics]
    drawn = [bars("Test accuracy", "", labels, rows)]
    for name, words in WORDS.items():
        layers = metrics[0][name]["log_alpha_by_iteration"]
        traces = [
            over_seeds(
                layer,
                metrics[0][name]["iterations"],
                [m[name]["log_alpha_by_iteration"][layer] for m in metrics],
            )
            for layer in layers
        ]
        drawn.append(figure(f"log α by iteration: {words}", "iteration", "log α", traces))
    return drawn


def _by_iteration(
    every: int,
) -> tuple[Any, Callable[[ImageSet, int, nn.Module], dict[str, Any]]]:
    """A callback that reads log α as it goes, and what puts its readings into the pass's row.

    So they are in the checkpoint, and a resumed training has each of them once.
    """
    import lightning.pytorch as pl

    class Readings(pl.Callback):
        rows: list[dict[str, Any]]

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.rows = []

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            step = trainer.current_epoch * pl_module.steps_per_epoch + batch_idx + 1
            if step % every == 0:
                self.rows.append({"iteration": step, "log_alpha": log_alphas(pl_module.model)})

    readings = Readings()

    def look_by_iteration(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, Any]:
        return cifar.look(few, epoch, model) | {"readings": readings.rows}

    return readings, look_by_iteration


def _rise(history: Sequence[Mapping[str, Any]], epochs: int) -> dict[str, Any]:
    """log α by iteration, when all layers are at the bound, and what happens in the end."""
    rows = [row for each in history for row in each["readings"]]
    iterations = [row["iteration"] for row in rows]
    layers = list(rows[0]["log_alpha"])
    means = [sum(row["log_alpha"].values()) / len(layers) for row in rows]
    there = [
        i for i, row in enumerate(rows) if min(row["log_alpha"].values()) >= math.log(AT_BOUND)
    ]
    reached = iterations[there[0] if there else -1]
    alphas = [math.exp(value) for value in rows[-1]["log_alpha"].values()]
    return {
        "iterations": iterations,
        "log_alpha_by_iteration": {
            layer: [row["log_alpha"][layer] for row in rows] for layer in layers
        },
        "iterations_to_bound": reached,
        "passes_to_bound": epochs * reached / iterations[-1],
        "alpha_mean": sum(alphas) / len(alphas),
        "log_alpha_mean": means[-1],
        "drift": means[-1] - means[int((1 - END) * (len(means) - 1))],
    }
