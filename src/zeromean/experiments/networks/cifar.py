"""Networks on CIFAR: what the experiments with them have in common.

The networks are the papers', the recipe is ours, for CPUs: SGD with Nesterov momentum over one
cycle of the rate, smoothed labels, reflected shifts, alternating flips and, where the CPU computes
in it, bfloat16. Networks that several experiments need are trained once, in the folder of models.
The smoke sizes run on scikit-learn's digits, enlarged and coloured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.networks.evaluation import (
    accuracy,
    drop_means,
    log_alphas,
    probabilities,
    top_accuracy,
)
from zeromean.experiments.runs.log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet
    from zeromean.training.config import Precision

ARCHITECTURES = ("vgg", "airbench")
PRECISIONS = ("auto", "float32", "bfloat16")
# What the paper has stochastic, and the same in the small network: convolutions, then dense.
LAST_LAYERS = {
    "vgg": ("conv11", "conv12", "conv13", "dense1"),
    "airbench": ("conv5", "conv6", "dense1"),
}
# The drop rate of the small network; the VGG-like one has the paper's.
DROP_RATE = 0.2
# Images whose patches whiten the first convolution of the small network.
WHITENING_SIZE = 2000
# Of log α, in the authors' code.
BOUNDS = (-20.0, 20.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Data, training and evaluation."""

    epochs: int = 30
    """Passes over the training set. The paper has 550, by Adam."""
    lr: float = 0.1
    """Rate of SGD at its peak."""
    peak_at: float = 0.25
    """Part of the training after which all rates peak; then they fall to zero."""
    weight_decay: float = 5e-4
    """L2 penalty on deterministic weights and on means."""
    label_smoothing: float = 0.1
    """Part of every label that goes to all classes alike."""
    log_alpha_lr: float = 0.03
    """Adam's rate for log α and log-variances at its peak."""
    log_alpha_beta2: float = 0.95
    """Adam's β₂ for the same, with which log α rises in fewer passes."""
    dropout: float = 1.0
    """Factor of the network's drop rates; 0 for none."""
    shift: int = 4
    """Pixels by which training images are shifted at most."""
    batch_size: int = 128
    """Images in a mini-batch."""
    width: float = 1.0
    """Width of the network, in parts of the paper's."""
    architecture: str = "vgg"
    """vgg, the paper's VGG-like network, or airbench, a small one for quick sizes."""
    precision: str = "auto"
    """float32, bfloat16, or auto: bfloat16 where the CPU computes in it. Which one it was is in the
    record (bits), and networks of the two are kept apart."""
    data: str = "cifar10"
    """Data set: cifar10, cifar100, or digits (enlarged and coloured)."""
    train_size: int = 45_000
    """Training images that are used, the first ones. The last 5,000 of the 50,000 are the
    validation set, on which settings are chosen."""
    look_size: int = 1000
    """Validation images on which a network is watched while it trains."""
    test_size: int = 10_000
    """Test images."""
    num_samples: int = 20
    """Samples in an averaged prediction."""
    seed: int = 0
    """Seed of the initialization, the batches and the noise."""

    def __post_init__(self) -> None:
        # Here, not where it is used: that may be hours later.
        for name in ("epochs", "batch_size", "train_size", "look_size", "test_size", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name, known in (("architecture", ARCHITECTURES), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}."
                )
        if not 0 <= self.dropout < 2:
            raise ValueError(
                f"dropout multiplies rates of up to 0.5: it must be in [0, 2), got {self.dropout}."
            )


# Arguments of the sizes that are not full.
QUICK: dict[str, Any] = {
    "epochs": 6,
    "train_size": 5000,
    "test_size": 1000,
    "look_size": 500,
    "batch_size": 64,
    "log_alpha_lr": 0.1,
    "architecture": "airbench",
    "width": 0.25,
}
SMOKE: dict[str, Any] = {
    "epochs": 2,
    "train_size": 96,
    "test_size": 50,
    "look_size": 50,
    "batch_size": 32,
    "width": 0.05,
    "data": "digits",
    "num_samples": 3,
}


@dataclass(frozen=True, kw_only=True)
class Network:
    """Which of the last layers are stochastic, and how; and whether there is dropout."""

    layers: tuple[str, ...] = ()
    """Names of layers; "last" stands for the paper's, `LAST_LAYERS`."""
    posterior: str = "layer"
    """Key of `POSTERIORS`."""
    prior: str = "log-uniform"
    """Key of `PRIORS`."""
    log_alpha: float = -10.0
    """log α at the start."""
    dropout: bool = True

    def build(self, settings: Settings, images: torch.Tensor, num_classes: int) -> nn.Module:
        from zeromean.models import airbench_like, vgg_like, whiten_

        names = LAST_LAYERS[settings.architecture] if self.layers == ("last",) else self.layers
        make: dict[str, Any] = {
            name: partial(
                zm.Conv2d if name.startswith("conv") else zm.Linear,
                posterior=partial(POSTERIORS[self.posterior], **_start(self)),
                prior=PRIORS[self.prior],
            )
            for name in names
        }
        dropout = self.dropout and settings.dropout > 0
        if settings.architecture == "vgg":
            network = vgg_like(settings.width, num_classes, dropout=dropout, **make)
        else:
            rate = DROP_RATE if dropout else 0.0
            network = airbench_like(settings.width, num_classes, dropout=rate, **make)
            whiten_(network, images[:WHITENING_SIZE])
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p *= settings.dropout
        return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


POSTERIORS: dict[str, Any] = {
    "zero-mean": zm.ZeroMean,
    "layer": partial(zm.Multiplicative, share="layer"),
    "neuron": partial(zm.Multiplicative, share="neuron"),
    "weight": partial(zm.Multiplicative, share="weight"),
    "additive": zm.Additive,
}
PRIORS: dict[str, Any] = {
    "log-uniform": zm.LogUniform(),
    "student-t": zm.StudentT(kl="quadrature"),
    "student-t-sample": zm.StudentT(kl="sample"),
    "ard": zm.ARD(),
}
DETERMINISTIC = Network(dropout=False)
DROPOUT = Network()
VARIANCE = Network(layers=("last",))


def _start(network: Network) -> dict[str, float]:
    return {} if network.posterior == "zero-mean" else {"log_alpha": network.log_alpha}


class Trained(NamedTuple):
    """A network after its training."""

    model: nn.Module
    history: list[dict[str, Any]]
    train: ImageSet
    test: ImageSet


def images(settings: Settings, split: str, log: RunLog) -> ImageSet:
    """The images of "rest" (for training), "validation" or "test" that the settings ask for."""
    sizes = {"rest": settings.train_size, "validation": settings.look_size}
    size = sizes.get(split, settings.test_size)
    return shared_networks.colour_images(settings.data, split, size, log)


def precision_of(settings: Settings) -> Precision:
    """What "auto" is on this CPU."""
    from zeromean.training.precision import computes_in_bfloat16, require_precision

    chosen: Any = settings.precision
    if chosen == "auto":
        chosen = "bfloat16" if computes_in_bfloat16() else "float32"
    require_precision(chosen)
    return chosen


def bits(settings: Settings) -> int:
    """Bits of the numbers that networks were computed in, for the record."""
    return {"float32": 32, "bfloat16": 16}[precision_of(settings)]


def train(name: str, network: Network, settings: Settings, log: RunLog, **options: Any) -> Trained:
    """Train a network of the VGG kind, or load it where it has been trained.

    Args:
        options: More of `TrainingConfig`, which makes another network of it.
    """
    build = partial(network.build, settings)
    identity = {"network": dataclasses.asdict(network)}
    if network.layers:
        options = {"clip_log_alpha": BOUNDS} | options
    return train_any(name, identity, build, settings, log, **options)


def train_any(
    name: str,
    identity: dict[str, Any],
    build: Callable[[torch.Tensor, int], nn.Module],
    settings: Settings,
    log: RunLog,
    *,
    watch: Callable[[ImageSet, int, nn.Module], dict[str, Any]] | None = None,
    augment: bool = True,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Trained:
    """Train any network on CIFAR by the recipe of the settings.

    Args:
        identity: What makes the network another one than others of the same settings.
        build: Makes it from training images and the number of classes.
        watch: Called after a pass with validation images, its number and the model; by default
            `look`. A network that is watched otherwise is another one.
        augment: Whether images are shifted and mirrored.
        options: More of `TrainingConfig`.
    """
    from zeromean.data import ShiftAndAlternate
    from zeromean.training import TrainingConfig

    precision = precision_of(settings)
    data = {split: images(settings, split, log) for split in ("rest", "validation", "test")}
    config = TrainingConfig(
        **{
            "epochs": settings.epochs,
            "batch_size": settings.batch_size,
            "optimizer": "sgd",
            "decay": "one-cycle",
            "lr": settings.lr,
            "peak_at": settings.peak_at,
            "weight_decay": settings.weight_decay,
            "label_smoothing": settings.label_smoothing,
            "log_alpha_lr": settings.log_alpha_lr,
            "log_alpha_beta2": settings.log_alpha_beta2,
            "precision": precision,
            "seed": settings.seed,
            **options,
        }
    )
    # How it is evaluated and what an experiment adds do not make another network of it.
    described = {key: value for key, value in config.described().items() if key != "seed"}
    names = ("dropout", "shift", "width", "architecture", "data", "train_size", "look_size")
    known = {name: getattr(settings, name) for name in names}
    watch = watch or look
    known |= {"precision": precision, "training": described, "watch": watch.__name__, **identity}
    known |= {} if augment else {"augment": False}
    log.say(f"{name}: in {precision}")
    rest = data["rest"]
    result = shared_networks.train(
        name,
        known,
        lambda: build(rest.images, rest.num_classes),
        rest,
        config,
        log,
        on_epoch=partial(watch, data["validation"]),
        augment=ShiftAndAlternate(settings.shift, settings.seed) if augment else None,
        callbacks=callbacks,
    )
    return Trained(result.model, result.history, rest, data["test"])


def look(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, Any]:
    """What is watched after a pass, on a few images."""
    row: dict[str, Any] = {
        "accuracy_mean": accuracy(model, few, 1, sampler=zm.mean),
        "accuracy_sample": accuracy(model, few, 1, seed=epoch),
    }
    return row | ({"log_alpha": alphas} if (alphas := log_alphas(model)) else {})


def look_closely(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, Any]:
    """The same, with ensembles of ten samples: as it is, and without its means."""
    row = look(few, epoch, model) | {"accuracy_ensemble": accuracy(model, few, 10, seed=epoch)}
    dropped, _ = drop_means(model, few.images[:10])
    if dropped is not None:
        row["accuracy_zero_mean"] = accuracy(dropped, few, 10, seed=epoch)
    return row


def measure(trained: Trained, settings: Settings) -> dict[str, Any]:
    """Test accuracies of one sample, of the means and of the average, for one and five guesses."""
    model, _, _, test = trained
    row: dict[str, Any] = {"log_alpha": log_alphas(model)}
    for key, num_samples, sampler, seed in (
        ("1", 1, None, 1),
        ("mean", 1, zm.mean, None),
        ("averaged", settings.num_samples, None, 2),
    ):
        proba = probabilities(model, test, num_samples, sampler=sampler, seed=seed)
        row[f"accuracy_{key}"] = top_accuracy(proba, test.labels)
        if test.num_classes > 10:
            row[f"top5_{key}"] = top_accuracy(proba, test.labels, 5)
    return row


def train_and_measure(
    name: str, network: Network, settings: Settings, log: RunLog, **options: Any
) -> tuple[dict[str, Any], Trained]:
    """Train one network and measure it, each once; with what was watched, by pass."""
    trained = train(name, network, settings, log, **options)
    measured = log.once(f"measure {name}", partial(measure, trained, settings))
    row = {**measured, "epochs": settings.epochs, "by_epoch": by_epoch(trained.history)}
    return row, trained


def by_epoch(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns of what was watched: accuracies, and log α of every layer."""
    first = history[0]
    columns: dict[str, Any] = {
        key: [row[key] for row in history] for key in first if key.startswith("accuracy_")
    }
    if "log_alpha" in first:
        columns["log_alpha"] = {
            layer: [row["log_alpha"][layer] for row in history] for layer in first["log_alpha"]
        }
    return columns
