"""LeNets with sparse variational dropout in every layer, and magnitude pruning beside it.

Errors are those of mean propagation, in per cent of the test images. Compression is the number of
weights over the number of those left, as in the literature. Sparse variational dropout prunes where
log α > 3, and does not train afterwards.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import zeromean as zm
from zeromean.compression.prune import EmptiedWarning
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import Author
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import shrinking
from zeromean.experiments.sparse_networks.lenet_figures import weight_images
from zeromean.experiments.sparse_networks.magnitude import prune_by_magnitude

if TYPE_CHECKING:
    from zeromean.data import ImageSet
    from zeromean.training import FitResult

# Validation images on which a network is watched while it trains.
LOOK_SIZE = 2000
# log α above which weights are pruned, and for the curve of errors by compression lower ones: what
# lies above the first is gone from the training on.
THRESHOLDS = (3.0, 2.0, 1.0, 0.0, -1.0, -2.0)
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


def claims(
    author: Author,
    *,
    error: tuple[float, float],
    compression: float,
    dense_error: float,
    sparsity: Mapping[str, float],
) -> list[Claim]:
    """What the lecture says of a network; the error as reported, and the most that is allowed."""
    reported, allowed = error
    return [
        Claim(
            "sparse.error",
            reported,
            author,
            allowed - reported,
            "at most",
            "sparse variational dropout: test error",
            "%",
        ),
        Claim(
            "sparse.compression",
            compression,
            author,
            0.0,
            "at least",
            "sparse variational dropout: weights over weights that are left",
            "×",
        ),
        Claim(
            "dense.error",
            dense_error,
            author,
            0.2,
            "at most",
            "the network that is not sparse",
            "%",
        ),
        *(
            Claim(
                f"sparse.sparsity.{layer}",
                value,
                author,
                0.0,
                "at least",
                f"weights of {layer} that are gone",
                "%",
            )
            for layer, value in sparsity.items()
        ),
    ]


def run(architecture: Callable[..., nn.Module], config: Settings, log: RunLog) -> dict[str, Any]:
    """Train, prune and measure: sparse variational dropout, then magnitude pruning."""
    train = shared_networks.grey_images(config.data, "rest", config.train_size, log)
    test = shared_networks.grey_images(config.data, "test", config.test_size, log)
    dense = train_dense(architecture, config, train, log)
    sparse = train_sparse(architecture, config, train, log)
    pruned = pruned_copy(sparse.model)
    return {
        "sparse": {
            **measure(pruned, test),
            "error_unpruned": error(sparse.model, test),
            "error_averaged": averaged_error(pruned, test),
        },
        "by_threshold": [
            {"threshold": threshold, **_error_and_compression(sparse.model, threshold, test)}
            for threshold in THRESHOLDS
        ],
        "quantized": quantized(pruned, test),
        "by_epoch": {key: [row[key] for row in sparse.history] for key in ("error", "compression")},
        "sparsity_by_epoch": _columns([row["sparsity"] for row in sparse.history]),
        "dense": {"error": error(dense.model, test)},
        "magnitude": _prune_by_magnitude(architecture, dense.model, config, train, test, log),
        "pictures": {
            "dense": weight_images(dense.model),
            "sparse": weight_images(pruned),
        },
        "frames": {row["epoch"]: row["frame"] for row in sparse.history if "frame" in row},
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
    chain = shrinking.whole_chain(architecture, LAYERS[architecture.__name__], result.model)
    for begin, end in pairwise(ends):
        chain, small = shrinking.shrink(chain, pruned_copy(result.model))
        whole = partial(shrinking.expand, chain, whole=_stochastic(architecture, config))
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
        whole_model = shrinking.expand(chain, result.model, _stochastic(architecture, config))
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
        if layer.bias is not None:
            layer.bias.copy_(plain.bias)


def train_dense(
    architecture: Callable[..., nn.Module], config: Settings, train: ImageSet, log: RunLog
) -> FitResult:
    """The deterministic network."""
    return _train(architecture, "dense", {}, config.dense_epochs, config, train, log)


def pruned_copy(model: nn.Module, threshold: float = THRESHOLDS[0]) -> nn.Module:
    """A copy, pruned where log α is above a threshold."""
    pruned = copy.deepcopy(model)
    with warnings.catch_warnings():
        # Early in the training, and with random labels, nothing may be left of a layer.
        warnings.simplefilter("ignore", EmptiedWarning)
        zm.prune_(pruned, threshold=threshold)
    return pruned.eval()


def measure(model: nn.Module, test: ImageSet) -> dict[str, Any]:
    """Error, compression and the sparsity of every layer, in per cent."""
    left = zm.sparsity(model)
    return {
        "error": error(model, test),
        "compression": left.total.compression,
        "kept": left.total.kept,
        "sparsity": {layer.name: 100 * layer.sparsity for layer in left.layers},
    }


def _error_and_compression(model: nn.Module, threshold: float, test: ImageSet) -> dict[str, float]:
    pruned = pruned_copy(model, threshold)
    return {"error": error(pruned, test), "compression": zm.sparsity(pruned).total.compression}


@torch.no_grad()
def error(model: nn.Module, data: ImageSet) -> float:
    """Per cent of images that mean propagation gets wrong."""
    with zm.sampling(model, zm.mean):
        scores = torch.cat([model(batch) for batch in data.images.split(1000)])
    return 100 * (scores.argmax(-1) != data.labels).double().mean().item()


def averaged_error(model: nn.Module, data: ImageSet, num_samples: int = 20) -> float:
    """The same for probabilities averaged over samples."""
    proba = [zm.predict_proba(model, x, num_samples, seed=0) for x in data.images.split(1000)]
    return 100 * (torch.cat(proba).argmax(-1) != data.labels).double().mean().item()


def quantized(pruned: nn.Module, test: ImageSet) -> dict[str, Any]:
    """Error, bytes and bits after rounding by the posterior, for each layer, neuron or weight."""
    results: dict[str, Any] = {}
    for per in ("layer", "neuron", "weight"):
        for tolerance in (0.5, 1.0):
            rounded = copy.deepcopy(pruned)
            report = zm.quantize_(rounded, per=per, tolerance=tolerance)
            kept = sum(layer.nonzero for layer in report.layers)
            results.setdefault(per, {})[f"tolerance {tolerance:g}"] = {
                "error": error(rounded, test),
                "bytes": report.size,
                "compression": report.compression,
                "bits": sum(layer.bits * layer.nonzero for layer in report.layers) / max(kept, 1),
            }
    return results


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


def _prune_by_magnitude(
    architecture: Callable[..., nn.Module],
    dense: nn.Module,
    config: Settings,
    train: ImageSet,
    test: ImageSet,
    log: RunLog,
) -> list[dict[str, float]]:
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


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {key: [row[key] for row in rows] for key in rows[0]}
