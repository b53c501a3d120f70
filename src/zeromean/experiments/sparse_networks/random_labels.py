"""Random labels: sparse variational dropout empties the network where binary dropout memorises.

Labels are shuffled, so that there is nothing to learn but the data set by heart. The evidence lower
bound refuses: what a weight would gain is less than what it costs. The control is the same network
with the same training on the true labels, which must be learned, with few weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.networks.evaluation import expecting_means
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import MOLCHANOV, ours
from zeromean.experiments.runs.figure import bars, figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import measures

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Random labels: a dense network on MNIST does not memorise them"
SOURCE = "lectures on Bayesian networks; Molchanov et al. (2017), section 5.6; Zhang et al. (2017)"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = (
    "chirkova: random labeling",
    "molchanov: random labeling",
    "chirkova: random labeling, test accuracy",
    "molchanov: random labeling, test accuracy",
)
VERSION = 2  # With the control on true labels, test accuracies, and the same training for all.
LABELS = ("random", "true")
KINDS = {"sparse": "sparse variational dropout", "dropout": "binary dropout"}
WIDTHS = (784, 1000, 500, 10)
NOTES = (
    "All four networks have the same {setting epochs} passes over the same {setting train_size} "
    "images. That a network ends empty says nothing by itself: a prior that is too strong empties "
    "every network. With the true labels the same training leaves {true.sparse.kept} weights of "
    "{weights}, which are right about {true.sparse.test_accuracy} per cent of the test images.",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Data and training, the same for all networks."""

    train_size: int = 10_000
    """Training images, the first ones."""
    epochs: int = 200
    """Passes over them, after which binary dropout has learned random labels by heart."""
    kl_warmup_epochs: int = 10
    """Epochs over which the weight of the KL term rises to 1."""
    log_variance: float = -10.0
    """Log-variance of the weights at the start."""
    batch_size: int = 100
    """Images in a mini-batch."""
    lr: float = 1e-3
    """Adam's learning rate, which falls linearly to zero."""
    test_size: int = 10_000
    """Test images."""
    data: str = "mnist"
    """Data set; digits are enlarged and coloured as need be."""
    seed: int = 0
    """Seed of the labels, the initialization, the batches and the noise."""


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """A network of dense layers on MNIST."""


QUICK = Config(train_size=1000, test_size=1000)
SMOKE = Config(train_size=100, test_size=100, epochs=3, batch_size=20, data="digits")


def claims(name: str) -> list[Claim]:
    """What the lecture says of a network, and what must be so for that to mean something."""
    lecture = MOLCHANOV("random labeling")
    rows: tuple[tuple[str, float, Any, float, str, str], ...] = (
        ("random.sparse.sparsity", 100.0, lecture, 0.1, "at least", "random labels: weights gone"),
        ("random.sparse.accuracy", 10.0, lecture, 2.0, "at most", "random labels, training set"),
        ("random.sparse.test_accuracy", 10.0, lecture, 2.0, "at most", "random labels, test set"),
        (
            "random.dropout.accuracy",
            100.0,
            lecture,
            2.0,
            "at least",
            "random labels learned by heart with binary dropout",
        ),
        (
            "random.dropout.test_accuracy",
            10.0,
            lecture,
            2.0,
            "at most",
            "random labels, test set, with binary dropout",
        ),
        (
            "lost_by_sparsity",
            0.0,
            ours("the control: with true labels the same training must not end empty"),
            1.0,
            "at most",
            "true labels: test accuracy below that of binary dropout",
        ),
        (
            "true.sparse.sparsity",
            90.0,
            ours("the control learns, and needs few weights for it"),
            0.0,
            "at least",
            "true labels: weights gone",
        ),
    )
    return [
        Claim(metric, value, author, tolerance, direction, f"{name}: {label}", "%")
        for metric, value, author, tolerance, direction, label in rows
    ]


CLAIMS = claims("dense")


def run(config: Config, log: RunLog) -> dict[str, Any]:
    return compare("dense", _dense, config, log)


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    variants = [(labels, kind) for labels in LABELS for kind in KINDS]
    epochs = list(range(1, len(metrics[0]["true"]["sparse"]["accuracy_by_epoch"]) + 1))
    by_epoch = [
        figure(
            title,
            "epoch",
            f"{title.lower()}, %",
            [
                over_seeds(
                    f"{labels} labels, {KINDS[kind]}",
                    epochs,
                    [m[labels][kind][f"{key}_by_epoch"] for m in metrics],
                )
                for labels, kind in variants
                if key != "sparsity" or kind == "sparse"
            ],
        )
        for key, title in (
            ("accuracy", "Accuracy on the training set"),
            ("sparsity", "Weights that are gone"),
        )
    ]
    rows = [
        {f"{labels} labels, {KINDS[kind]}": m[labels][kind] for labels, kind in variants}
        for m in metrics
    ]
    shown = {"accuracy": "training set", "test_accuracy": "test set"}
    return [*by_epoch, bars("Accuracy at the end", "network", shown, rows)]


def compare(
    name: str,
    build: Callable[[str, Any], nn.Module],
    config: Settings,
    log: RunLog,
    identity: Sequence[Any] = (),
) -> dict[str, Any]:
    """Train a network of each kind on random and on true labels, and measure all four.

    Args:
        name: Of the network.
        build: Makes it from the kind and the configuration.
        identity: What else makes it another network.
    """
    results: dict[str, Any] = {}
    # All of them first: what is missing should not be found after hours of training.
    sets = {labels: _images(name, labels, config, log) for labels in LABELS}
    test = _images(name, "test", config, log)
    for labels, data in sets.items():
        for kind in KINDS:
            trained = _train(name, labels, kind, build, config, data, log, identity)
            model = trained.model.eval()
            if kind == "sparse":
                model = measures.pruned_copy(model)
            model = expecting_means(model, data)
            left = zm.sparsity(model).total
            results.setdefault(labels, {})[kind] = {
                "accuracy": 100 - measures.error(model, data),
                "test_accuracy": 100 - measures.error(model, test),
                "sparsity": 100 * left.sparsity,
                "kept": left.kept,
                "accuracy_by_epoch": [row["accuracy"] for row in trained.history],
                "sparsity_by_epoch": [row["sparsity"] for row in trained.history],
            }
            results["weights"] = left.weights
    true = results["true"]
    results["lost_by_sparsity"] = true["dropout"]["test_accuracy"] - true["sparse"]["test_accuracy"]
    return results


def sparse_layer(layer: Callable[..., nn.Module], config: Settings) -> Any:
    posterior = partial(zm.Additive, log_variance=config.log_variance)
    return partial(layer, posterior=posterior, prior=zm.LogUniform())


def _dense(kind: str, config: Config) -> nn.Module:
    from zeromean.models.dense import mlp

    if kind == "sparse":
        return mlp(WIDTHS, sparse_layer(zm.Linear, config))
    return mlp(WIDTHS, dropout=0.5)


def _train(
    name: str,
    labels: str,
    kind: str,
    build: Callable[[str, Any], nn.Module],
    config: Settings,
    data: ImageSet,
    log: RunLog,
    identity: Sequence[Any],
) -> Any:
    from zeromean.training import TrainingConfig

    settings = TrainingConfig(
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        log_alpha_lr=10 * config.lr,
        kl_warmup_epochs=config.kl_warmup_epochs if kind == "sparse" else 0,
        seed=config.seed,
    )
    known = {
        "experiment": "random_labels",
        "network": [name, kind, *identity],
        "labels": labels,
        "training": {key: value for key, value in settings.described().items() if key != "seed"},
        "data": [config.data, len(data)],
        **({"log_variance": config.log_variance} if kind == "sparse" else {}),
    }
    return shared_networks.train(
        f"{name}, {labels} labels, {kind}",
        known,
        partial(build, kind, config),
        data,
        settings,
        log,
        on_epoch=partial(_look, data),
    )


def _look(data: ImageSet, epoch: int, model: nn.Module) -> dict[str, float]:
    few = data.subset(torch.arange(min(500, len(data))))
    stochastic = bool(zm.stochastic_layers(model))
    shown = measures.pruned_copy(model) if stochastic else model.eval()
    return {
        "accuracy": 100 - measures.error(shown, few),
        "sparsity": 100 * zm.sparsity(shown).total.sparsity,
    }


def _images(name: str, labels: str, config: Settings, log: RunLog) -> ImageSet:
    """The first training images, with labels that say nothing about them; or those of the test."""
    from zeromean import data

    split = "test" if labels == "test" else "rest"
    loaded = data.load(config.data, split, data_dir=log.data_dir)
    size = config.test_size if labels == "test" else config.train_size
    chosen = loaded.subset(torch.arange(min(size, len(loaded))))
    images = chosen.images
    if config.data == "digits":
        pixels, channels = (28, 1) if name == "dense" else (32, 3)
        images = F.interpolate(images, (pixels, pixels), mode="bilinear")
        images = images.expand(-1, channels, -1, -1)
    order = torch.arange(len(chosen))
    if labels == "random":
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(chosen), generator=generator)
    return dataclasses.replace(chosen, images=images.contiguous(), labels=chosen.labels[order])
