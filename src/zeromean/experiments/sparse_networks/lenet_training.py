"""How the LeNets are trained: sparse variational dropout, no dropout, and pruning by magnitude."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import chains
from zeromean.experiments.sparse_networks.lenet_figures import weight_images
from zeromean.experiments.sparse_networks.magnitude import prune_by_magnitude
from zeromean.experiments.sparse_networks.measures import error, measure, pruned_copy

if TYPE_CHECKING:
    from zeromean.data import ImageSet
    from zeromean.training import FitResult

# Validation images on which a network is watched while it trains.
LOOK_SIZE = 2000
# Epochs after which the lecture's picture is taken: filters, and a patch of the largest layer.
FRAMES = (1, 2, 5, 10, 15, 20, 30, 50, 100, 200)
LAYERS = {
    "lenet_300_100": ("dense1", "dense2", "dense3"),
    "lenet5_caffe": ("conv1", "conv2", "dense1", "dense2"),
    "relu_lenet5_caffe": ("conv1", "conv2", "dense1", "dense2"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Data and training of a network, and of those that it is compared with."""

    epochs: int = 100
    """Epochs of sparse variational dropout."""
    shrink_after: tuple[int, ...] = ()
    """Epochs after which empty units are taken out of the network, so that the rest is faster. The
    learning rate falls after the last of them only."""
    pretrained: bool = False
    """Start from the network that is not sparse, in place of random means."""
    lr: float = 5e-3
    """Adam's learning rate for means and biases, which falls linearly to zero."""
    log_variance_lr: float = 2e-3
    """The same for the log-variances."""
    kl_warmup_epochs: int = 10
    """Epochs over which the weight of the KL term rises to 1."""
    log_variance: float = -10.0
    """Log-variance of the weights at the start."""
    prune_after_epochs: int = 10
    """Epochs after which weights with log α > 3 are pruned before each epoch, for good."""
    average_epochs: float = 2.0
    """Time constant of the moving average of the weights, which is what is judged."""
    batch_size: int = 100
    """Images in a mini-batch."""
    dense_epochs: int = 30
    """Epochs of the network that is not sparse."""
    dense_lr: float = 1e-3
    """Its learning rate, also of the training after magnitude pruning."""
    magnitude: tuple[float, ...] = (4.0, 12.0, 30.0, 70.0)
    """Compression factors to which that one is pruned by magnitude, one after the other."""
    retraining_epochs: int = 10
    """Epochs of training after each of these steps."""
    data: str = "mnist"
    """Data set: mnist, fashion-mnist, or digits (enlarged to 28 × 28)."""
    train_size: int = 55_000
    """Training images that are used, the first ones. The last 5,000 of the 60,000 are the
    validation set, on which settings are chosen."""
    test_size: int = 10_000
    """The same for the test."""
    seed: int = 0
    """Seed of the initialization, the batches and the noise."""


# Arguments of the sizes that are not full.
QUICK: dict[str, Any] = {
    "epochs": 10,
    "kl_warmup_epochs": 2,
    "prune_after_epochs": 4,
    "average_epochs": 1.0,
    "dense_epochs": 3,
    "magnitude": (4.0, 12.0),
    "retraining_epochs": 1,
    "train_size": 10_000,
    "test_size": 2000,
}
SMOKE: dict[str, Any] = {
    "epochs": 3,
    "kl_warmup_epochs": 1,
    "prune_after_epochs": 2,
    "average_epochs": 0.5,
    "dense_epochs": 2,
    "magnitude": (4.0, 8.0),
    "retraining_epochs": 1,
    "data": "digits",
    "train_size": 500,
    "test_size": 100,
    "batch_size": 20,
}


def train_sparse(
    architecture: Callable[..., nn.Module],
    config: Settings,
    train: ImageSet,
    log: RunLog,
) -> FitResult:
    """The network with sparse variational dropout in every layer, watched on validation images."""
    validation = shared_networks.grey_images(config.data, "validation", LOOK_SIZE, log)
    ends = (*config.shrink_after, config.epochs)
    if list(ends) != sorted(set(ends)) or ends[0] < 1:
        raise ValueError(
            "shrink_after must be epochs in rising order, all before the last one, got "
            f"{config.shrink_after} with epochs={config.epochs}."
        )
    training = {
        "kl_warmup_epochs": config.kl_warmup_epochs,
        "prune_after_epochs": config.prune_after_epochs,
        "average_epochs": config.average_epochs,
        "lr": config.lr,
        "log_alpha_lr": config.log_variance_lr,
        **({"decay": "constant"} if len(ends) > 1 else {}),
    }
    identity: dict[str, Any] = {"log_variance": config.log_variance}
    start = None
    if config.pretrained:
        start = _stochastic(architecture, config)
        dense = train_dense(architecture, config, train, log).model
        _copy_means_(start, dense)
        identity["pretrained"] = config.dense_epochs
        if config.dense_lr != Settings.dense_lr:  # Networks of the default rate keep their names.
            identity["dense_lr"] = config.dense_lr
    result = _train(
        architecture,
        "sparse",
        _sparse_layers(architecture, config),
        ends[0],
        config,
        train,
        log,
        identity=identity,
        training=training,
        start=start,
        on_epoch=partial(_look, validation, 0),
    )
    chain = chains.whole_chain(architecture, LAYERS[architecture.__name__], result.model)
    for begin, end in pairwise(ends):
        chain, small = chains.shrink(chain, pruned_copy(result.model))
        whole = partial(chains.expand, chain, whole=_stochastic(architecture, config))
        later = {**training, "kl_warmup_epochs": 0, "prune_after_epochs": 0}
        if end == config.epochs:
            later["decay"] = "linear"
        part = _train(
            architecture,
            f"sparse, from epoch {begin}",
            {},
            end - begin,
            config,
            train,
            log,
            identity={**identity, "first": {**training, "shrunk": [e for e in ends if e < end]}},
            training=later,
            start=small.to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
            on_epoch=lambda epoch, model, whole=whole, begin=begin: _look(
                validation, begin, epoch, whole(model)
            ),
        )
        rows = [{**row, "epoch": row["epoch"] + begin} for row in part.history]
        result = replace(part, history=[*result.history, *rows])
    if config.shrink_after:
        whole_model = chains.expand(chain, result.model, _stochastic(architecture, config))
        result = replace(result, model=whole_model)
    return result


def _sparse_layers(architecture: Callable[..., nn.Module], config: Settings) -> dict[str, Any]:
    """How each layer is made."""
    posterior = partial(zm.Additive, log_variance=config.log_variance)
    return {
        name: partial(
            zm.Conv2d if name.startswith("conv") else zm.Linear,
            posterior=posterior,
            prior=zm.LogUniform(),
        )
        for name in LAYERS[architecture.__name__]
    }


def _stochastic(architecture: Callable[..., nn.Module], config: Settings) -> nn.Module:
    network = architecture(**_sparse_layers(architecture, config))
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


@torch.no_grad()
def _copy_means_(model: nn.Module, dense: nn.Module) -> None:
    for name, layer in zm.stochastic_layers(model).items():
        plain: Any = dense.get_submodule(name)
        layer.weight.set_weight_(plain.weight)
        if isinstance(layer.bias, nn.Parameter):
            layer.bias.copy_(plain.bias)


def train_dense(
    architecture: Callable[..., nn.Module], config: Settings, train: ImageSet, log: RunLog
) -> FitResult:
    """The deterministic network."""
    return _train(architecture, "dense", {}, config.dense_epochs, config, train, log)


def _train(
    architecture: Callable[..., nn.Module],
    name: str,
    make: Mapping[str, Any],
    epochs: int,
    config: Settings,
    train: ImageSet,
    log: RunLog,
    *,
    identity: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    start: nn.Module | None = None,
    on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None = None,
) -> FitResult:
    """Train a network with the layers that `make` makes, or go on with `start`."""
    from zeromean.training import TrainingConfig

    options = {"lr": config.dense_lr, **(training or {})}
    settings = TrainingConfig(
        epochs=epochs, batch_size=config.batch_size, seed=config.seed, **options
    )

    def build() -> nn.Module:
        if start is not None:
            return start
        network = architecture(**make)
        return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    known = {
        "architecture": architecture.__name__,
        "name": name,
        **(identity or {}),
        "training": {key: value for key, value in settings.described().items() if key != "seed"},
        "data": [config.data, config.train_size],
    }
    return shared_networks.train(name, known, build, train, settings, log, on_epoch=on_epoch)


def _look(few: ImageSet, begin: int, epoch: int, model: nn.Module) -> dict[str, Any]:
    """What is left of the network after `begin + epoch` epochs, with its picture after some."""
    pruned = pruned_copy(model)
    row = {k: v for k, v in measure(pruned, few).items() if k != "kept"}
    return row | ({"frame": weight_images(pruned)} if begin + epoch in FRAMES else {})


def compare_with_magnitude(
    architecture: Callable[..., nn.Module],
    dense: nn.Module,
    config: Settings,
    train: ImageSet,
    test: ImageSet,
    log: RunLog,
) -> list[dict[str, float]]:
    """Errors and compression of the network pruned by magnitude, trained after each step."""

    def retrain(model: nn.Module, steps: list[float]) -> nn.Module:
        return _train(
            architecture,
            f"magnitude {steps[-1]:g}",
            {},
            config.retraining_epochs,
            config,
            train,
            log,
            identity={"steps": steps, "dense_epochs": config.dense_epochs},
            start=model,
        ).model

    return [
        {"compression": compression, "error": error(model, test)}
        for compression, model in prune_by_magnitude(dense, config.magnitude, retrain)
    ]
