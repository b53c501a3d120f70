"""Random labels: sparse variational dropout empties the network where binary dropout memorises.

Labels are shuffled, so that there is nothing to learn but the data set by heart. The evidence lower
bound refuses: what a weight would gain is less than what it costs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.experiments import shared_networks, sparse_networks
from zeromean.experiments.claims import Claim
from zeromean.experiments.documents import MOLCHANOV
from zeromean.experiments.figure import bars, figure, over_seeds
from zeromean.experiments.run_log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Random labels: sparse variational dropout does not memorise"
SOURCE = "lectures on Bayesian networks; Molchanov et al. (2017), section 5.6; Zhang et al. (2017)"
NEEDS: tuple[str, ...] = ("mnist", "cifar10")
COVERS = ("chirkova: random labeling", "molchanov: random labeling")
NETWORKS = {"fc": "mnist", "vgg": "cifar10"}
NOTES = (
    "The narrow VGG-like network, with dropout behind most of its convolutions, learns by "
    "heart slowly and has {setting vgg_dropout_epochs} passes over its {setting "
    "vgg_train_size} images, sparse variational dropout {setting vgg_epochs}. Dropout also "
    "adds variance to what its BatchNorm sees in training, and in training alone: the "
    "accuracy at the end is with statistics estimated anew without dropout, that by epoch "
    "(and accuracy_as_trained) with those of the training.",
    "That a network ends empty proves nothing by itself: on so few images the same VGG-like "
    "network ends as empty with true labels. The control on true labels and the lecture's "
    "column of test accuracies are still to be run.",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A fully connected network on MNIST and a narrow VGG-like one on CIFAR-10."""

    networks: tuple[str, ...] = tuple(NETWORKS)
    """fc, vgg."""
    train_size: int = 5000
    """Training images, the first ones, with their labels shuffled."""
    vgg_train_size: int = 1000
    """At most so many of them for the VGG-like networks."""
    fc_epochs: int = 150
    """Epochs of each fully connected network."""
    vgg_epochs: int = 200
    """Epochs of the VGG-like network with sparse variational dropout."""
    vgg_dropout_epochs: int = 800
    """Epochs of the one with binary dropout, which learns by heart slowly: it is narrow, and most
    of its layers are noisy."""
    width: float = 0.25
    """Width of the VGG-like network, in parts of the original."""
    batch_size: int = 100
    """Images in a mini-batch."""
    lr: float = 1e-3
    """Adam's learning rate, which falls linearly to zero."""
    data: str = ""
    """Another data set for both networks; digits are enlarged and coloured as need be."""
    seed: int = 0
    """Seed of the labels, the initialization, the batches and the noise."""


QUICK = Config(networks=("fc",), train_size=1000, fc_epochs=100)
SMOKE = Config(
    train_size=100,
    fc_epochs=3,
    vgg_epochs=2,
    vgg_dropout_epochs=3,
    width=0.05,
    batch_size=20,
    data="digits",
)
CLAIMS = [
    claim
    for network, name in (("fc", "fully connected, MNIST"), ("vgg", "VGG-like, CIFAR-10"))
    for claim in (
        Claim(
            f"{network}.sparse.sparsity",
            100.0,
            MOLCHANOV("random labeling"),
            0.1,
            "at least",
            f"{name}: weights that sparse variational dropout takes away",
            "%",
        ),
        Claim(
            f"{network}.sparse.accuracy",
            10.0,
            MOLCHANOV("random labeling"),
            2.0,
            "at most",
            f"{name}: its accuracy on the training set",
            "%",
        ),
        Claim(
            f"{network}.dropout.accuracy",
            100.0,
            MOLCHANOV("random labeling"),
            2.0,
            "at least",
            f"{name}: accuracy of binary dropout on the training set",
            "%",
        ),
    )
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    unknown = [name for name in config.networks if name not in NETWORKS]
    if unknown:
        raise ValueError(f"there is no network {unknown[0]!r}; choose from {', '.join(NETWORKS)}.")
    results: dict[str, Any] = {}
    # All of them first: what is missing should not be found after hours of training.
    sets = {network: _shuffled(network, config, log) for network in config.networks}
    for network, data in sets.items():
        for kind in ("sparse", "dropout"):
            trained = _train(network, kind, config, data, log)
            if kind == "sparse":
                model = sparse_networks.pruned_copy(trained.model)
            else:
                model = _without_dropout(trained.model, data)
            left = zm.sparsity(model).total
            results.setdefault(network, {})[kind] = {
                "accuracy": 100 - sparse_networks.error(model, data),
                "accuracy_as_trained": 100 - sparse_networks.error(trained.model.eval(), data),
                "sparsity": 100 * left.sparsity,
                "kept": left.kept,
                "accuracy_by_epoch": [row["accuracy"] for row in trained.history],
                "sparsity_by_epoch": [row["sparsity"] for row in trained.history],
            }
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    kinds = {"sparse": "sparse variational dropout", "dropout": "binary dropout"}
    drawn = []
    for network, results in metrics[0].items():
        drawn += [
            figure(
                f"{network}: {label}",
                "epoch",
                f"{label}, %",
                [
                    over_seeds(
                        name,
                        list(range(1, len(results[kind][f"{key}_by_epoch"]) + 1)),
                        [m[network][kind][f"{key}_by_epoch"] for m in metrics],
                    )
                    for kind, name in kinds.items()
                ],
            )
            for key, label in (
                ("accuracy", "accuracy on the training set"),
                ("sparsity", "weights that are gone"),
            )
        ]
    flat = [
        {f"{n}, {kinds[k]}": row for n, rows in m.items() for k, row in rows.items()}
        for m in metrics
    ]
    return [*drawn, bars("At the end", "network", {"accuracy": "accuracy, training set"}, flat)]


def _train(network: str, kind: str, config: Config, data: ImageSet, log: RunLog) -> Any:
    from zeromean.training import TrainingConfig

    vgg_epochs = {"sparse": config.vgg_epochs, "dropout": config.vgg_dropout_epochs}
    settings = TrainingConfig(
        epochs=config.fc_epochs if network == "fc" else vgg_epochs[kind],
        batch_size=config.batch_size,
        lr=config.lr,
        log_alpha_lr=10 * config.lr,
        kl_warmup_epochs=1 if kind == "sparse" else 0,
        seed=config.seed,
    )
    training = {key: value for key, value in settings.described().items() if key != "seed"}
    identity = {
        "experiment": "random_labels",
        "network": [network, kind, config.width if network == "vgg" else None],
        "training": training,
        "data": [config.data or NETWORKS[network], len(data)],
    }
    build = partial(_fc, kind) if network == "fc" else partial(_vgg, kind, config.width)
    return shared_networks.train(
        f"{network}, {kind}", identity, build, data, settings, log, on_epoch=partial(_look, data)
    )


def _fc(kind: str) -> nn.Module:
    from zeromean.models import mlp

    widths = (784, 1000, 500, 10)
    return mlp(widths, _layer(zm.Linear)) if kind == "sparse" else mlp(widths, dropout=0.5)


def _vgg(kind: str, width: float) -> nn.Module:
    from zeromean.models import vgg_like

    conv, dense = _layer(zm.Conv2d), _layer(zm.Linear)
    sparse = {"conv": conv, "dense1": dense, "dense2": dense}
    network = vgg_like(width, dropout=kind == "dropout", **(sparse if kind == "sparse" else {}))
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _layer(layer: Callable[..., nn.Module]) -> Any:
    return partial(layer, posterior=zm.Additive, prior=zm.LogUniform())


def _without_dropout(model: nn.Module, data: ImageSet) -> nn.Module:
    """The network whose BatchNorm expects what it sees: activations without dropout.

    Dropout adds variance to what BatchNorm sees in training and in training alone.
    """
    model = copy.deepcopy(model).eval()
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        with zm.sampling(model, zm.mean):
            zm.recalibrate_batchnorm_(model, data.images.split(500))
    return model


def _look(data: ImageSet, epoch: int, model: nn.Module) -> dict[str, float]:
    few = data.subset(torch.arange(min(500, len(data))))
    stochastic = bool(zm.stochastic_layers(model))
    shown = sparse_networks.pruned_copy(model) if stochastic else model.eval()
    return {
        "accuracy": 100 - sparse_networks.error(shown, few),
        "sparsity": 100 * zm.sparsity(shown).total.sparsity,
    }


def _shuffled(network: str, config: Config, log: RunLog) -> ImageSet:
    """The first training images with labels that say nothing about them."""
    from zeromean import data

    name = config.data or NETWORKS[network]
    loaded = data.load(name, "train", data_dir=log.data_dir)
    count = min(config.train_size, len(loaded))
    if network == "vgg":
        count = min(count, config.vgg_train_size)
    chosen = loaded.subset(torch.arange(count))
    generator = torch.Generator().manual_seed(config.seed)
    labels = chosen.labels[torch.randperm(len(chosen), generator=generator)]
    images = chosen.images
    if config.data == "digits":
        size, channels = (28, 1) if network == "fc" else (32, 3)
        images = F.interpolate(images, (size, size), mode="bilinear").expand(-1, channels, -1, -1)
    return dataclasses.replace(chosen, images=images.contiguous(), labels=labels)
