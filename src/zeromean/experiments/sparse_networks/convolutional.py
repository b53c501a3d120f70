"""Sparse variational dropout in convolutional networks on CIFAR, from a trained network.

A network is trained without noise; then its weights are the means of a posterior, and the weight
of the KL term rises. What has log α > 3 is pruned, and BatchNorm gets the statistics of the means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import cifar
from zeromean.experiments.networks.evaluation import expecting_means
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import measures

if TYPE_CHECKING:
    from zeromean.data import ImageSet

# Makes a network from the number of classes and the factories of convolutions and dense layers.
Build = Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class Settings(cifar.Settings):
    """Data and training: first without noise, by SGD, then with it, by Adam."""

    dense_epochs: int = 16
    """Passes of the network without noise, from which the others start."""
    epochs: int = 16
    """Passes of sparse variational dropout."""
    kl_warmup_epochs: int = 8
    """Passes over which the weight of the KL term rises."""
    sparse_lr: float = 1e-3
    """Adam's rate of the means at its peak."""
    log_alpha_lr: float = 0.01
    """The same for log-variances."""
    log_alpha_beta2: float = 0.999
    """Adam's β₂ for the same."""
    log_variance: float = -10.0
    """Log-variance of the weights at the start."""
    dropout: float = 0.0
    """Factor of the network's drop rates; 0 for none."""


QUICK: dict[str, Any] = {
    "dense_epochs": 4,
    "epochs": 6,
    "kl_warmup_epochs": 3,
    "log_alpha_lr": 0.03,
    "train_size": 5000,
    "test_size": 1000,
    "look_size": 500,
    "batch_size": 64,
}
SMOKE: dict[str, Any] = {
    **cifar.SMOKE,
    "dense_epochs": 1,
    "epochs": 1,
    "kl_warmup_epochs": 1,
}


def train_dense(
    name: str, identity: dict[str, Any], build: Build, settings: Settings, log: RunLog
) -> cifar.Trained:
    """The network without noise."""
    return cifar.train_any(
        f"{name}, dense",
        {"network": ["dense", identity]},
        lambda images, num_classes: _channels_last(build(num_classes)),
        settings,
        log,
        epochs=settings.dense_epochs,
    )


def train_sparse(
    name: str,
    identity: dict[str, Any],
    build: Build,
    settings: Settings,
    log: RunLog,
    *,
    beta: float = 1.0,
) -> cifar.Trained:
    """The same with noise on all weights, from the weights of the one without."""
    dense = train_dense(name, identity, build, settings, log).model
    posterior = partial(zm.Additive, log_variance=settings.log_variance)
    conv = partial(zm.Conv2d, posterior=posterior, prior=zm.LogUniform())
    linear = partial(zm.Linear, posterior=posterior, prior=zm.LogUniform())

    def begin(images: Any, num_classes: int) -> nn.Module:
        network = build(num_classes, conv=conv, linear=linear)
        # The names of the layers are the same; a posterior calls a weight its mean.
        means = {f"{n}.weight": f"{n}.weight.mean" for n in zm.stochastic_layers(network)}
        state = {means.get(key, key): value for key, value in dense.state_dict().items()}
        network.load_state_dict({**network.state_dict(), **state})
        return _channels_last(network)

    start = {"dense_epochs": settings.dense_epochs, "dense_lr": settings.lr}
    return cifar.train_any(
        f"{name}, sparse",
        {"network": ["sparse", identity], "log_variance": settings.log_variance, **start},
        begin,
        settings,
        log,
        watch=look,
        optimizer="adam",
        lr=settings.sparse_lr,
        weight_decay=0.0,
        kl_warmup_epochs=settings.kl_warmup_epochs,
        beta=beta,
    )


def look(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, Any]:
    """What is watched after a pass: accuracies of the means, and what would be left."""
    left = zm.sparsity(measures.pruned_copy(model)).total
    return cifar.look(few, epoch, model) | {"sparsity": 100 * left.sparsity}


def pruned(trained: cifar.Trained) -> nn.Module:
    """What is left of a sparse network, expecting its means."""
    return expecting_means(measures.pruned_copy(trained.model), trained.train)


def measure(network: nn.Module, test: ImageSet) -> dict[str, Any]:
    """Test error, what is left, and by layer."""
    left = zm.sparsity(network).total
    return measures.measure(network, test) | {
        "sparsity_of_all": 100 * left.sparsity,
        "accuracy": 100 - measures.error(network, test),
    }


def _channels_last(network: nn.Module) -> nn.Module:
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
