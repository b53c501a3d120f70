"""How networks on CIFAR are trained.

SGD with Nesterov momentum over one cycle of the rate, smoothed labels, reflected shifts,
alternating flips and, where the CPU computes in it, bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromean.experiments.networks import shared_networks
from zeromean.experiments.networks.cifar.architecture import Network
from zeromean.experiments.networks.cifar.measures import Trained, by_epoch, look, measure
from zeromean.experiments.networks.cifar.settings import Settings, precision_of
from zeromean.experiments.runs.log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet

# Of log α, in the authors' code.
BOUNDS = (-20.0, 20.0)


def images(settings: Settings, split: str, log: RunLog) -> ImageSet:
    """The images of "rest" (for training), "validation" or "test" that the settings ask for."""
    sizes = {"rest": settings.train_size, "validation": settings.look_size}
    size = sizes.get(split, settings.test_size)
    return shared_networks.colour_images(settings.data, split, size, log)


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


def train_and_measure(
    name: str, network: Network, settings: Settings, log: RunLog, **options: Any
) -> tuple[dict[str, Any], Trained]:
    """Train one network and measure it, each once; with what was watched, by pass."""
    trained = train(name, network, settings, log, **options)
    measured = log.once(f"measure {name}", partial(measure, trained, settings))
    row = {**measured, "epochs": settings.epochs, "by_epoch": by_epoch(trained.history)}
    return row, trained
