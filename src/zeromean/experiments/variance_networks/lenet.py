"""LeNet-5 with stochastic layers: what the experiments on MNIST have in common.

Experiments that need the same network share it: it is trained once, in the folder of models, with
the accuracies of every epoch next to it. The smoke sizes run on scikit-learn's digits, enlarged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.networks.distributions import POSTERIORS, PRIORS
from zeromean.experiments.networks.evaluation import (
    accuracy,
    approximate_kl,
    log_alphas,
    log_likelihood,
    look,
)
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import Author
from zeromean.experiments.runs.log import RunLog
from zeromean.registry import NOISES, SAMPLERS

if TYPE_CHECKING:
    from zeromean.data import ImageSet

# Of a layer by itself, also what it has by default, and what is learned.
LAYER_PRIORS: dict[str, Any] = {**PRIORS, "default": "default", "normal": zm.Normal(learn=True)}
# Validation images on which a network is watched while it trains.
LOOK_SIZE = 2000
# What the means are right about when they know nothing and name one class: the paper's, of the
# digit 1 (11.35% of the test images). Another class has fewer, so that no more than this counts.
CONSTANT_CLASS = 11.3
CONSTANT_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Data, training and evaluation."""

    epochs: int = 100
    """Passes over the training set; the paper has 200."""
    lr: float = 1e-3
    """Adam's learning rate, which falls linearly to zero."""
    log_alpha_lr: float = 3e-2
    """The same for log α and log-variances. With the 1e-3 of everything else, log α needs several
    times as many epochs."""
    batch_size: int = 200
    """Images in a mini-batch."""
    data: str = "mnist"
    """Data set: mnist, fashion-mnist, or digits (enlarged to 28 × 28)."""
    train_size: int = 55_000
    """Training images that are used, the first ones. The last 5,000 of the 60,000 are the
    validation set, on which settings are chosen."""
    test_size: int = 10_000
    """The same for the test."""
    num_samples: int = 20
    """Samples in an averaged prediction."""
    seed: int = 0
    """Seed of the initialization, the batches and the noise."""

    def __post_init__(self) -> None:
        # Here, not where it is used: that may be hours later.
        for name in ("epochs", "batch_size", "train_size", "test_size", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")


SettingsT = TypeVar("SettingsT", bound=Settings)


def means_know_nothing(name: str, author: Author) -> Claim:
    """The claim that mean propagation names the same class for (nearly) every image."""
    return Claim(
        f"{name}.accuracy_mean",
        CONSTANT_CLASS,
        author,
        CONSTANT_TOLERANCE,
        "at most",
        f"{name}: mean propagation is a constant",
        "%",
    )


def as_accurate(metric: str, value: float, author: Author, label: str) -> Claim:
    """The claim of an accuracy, which may be lower by what lies between runs."""
    return Claim(metric, value, author, 0.15, "at least", label, "%")


# Arguments of the sizes that are not full.
QUICK: dict[str, Any] = {
    "epochs": 8,
    "train_size": 5000,
    "test_size": 1000,
    "batch_size": 100,
    "log_alpha_lr": 0.1,
}
SMOKE: dict[str, Any] = {
    "epochs": 3,
    "train_size": 500,
    "test_size": 100,
    "batch_size": 20,
    "data": "digits",
    "num_samples": 5,
}


@dataclass(frozen=True, kw_only=True)
class Network:
    """A LeNet-5: which of its layers are stochastic, and how."""

    layers: tuple[str, ...] = ("dense1",)
    posterior: str = "zero-mean"
    prior: str = "default"
    noise: str = "normal"
    sampler: str = "default"
    dropout: float = 0.0
    activation: str = "ReLU"
    batchnorm: bool | tuple[str, ...] = True
    bias: bool = True

    def build(self) -> nn.Sequential:
        from zeromean.models.lenet import lenet5

        posterior = partial(POSTERIORS[self.posterior], noise=NOISES[self.noise])
        prior = LAYER_PRIORS[self.prior]
        sampler = "default" if self.sampler == "default" else SAMPLERS[self.sampler]
        make: dict[str, Any] = {
            name: partial(
                zm.Conv2d if name.startswith("conv") else zm.Linear,
                posterior=posterior,
                prior=prior,
                sampler=sampler,
            )
            for name in self.layers
        }
        network = lenet5(
            **make,
            batchnorm=self.batchnorm,
            bias=self.bias,
            activation=getattr(nn, self.activation),
            dropout=self.dropout,
        )
        # Pooling is several times faster in this format on a CPU, a whole step a third.
        return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


class Trained(NamedTuple):
    """A network after its training."""

    model: nn.Module
    history: list[dict[str, Any]]
    train: ImageSet
    test: ImageSet


def train(
    name: str,
    network: Network,
    settings: Settings,
    log: RunLog,
    *,
    watch: Callable[[ImageSet, int, nn.Module], dict[str, Any]] = look,
    **options: Any,
) -> Trained:
    """Train a LeNet-5, or load it where it has been trained.

    Args:
        watch: What is measured after every epoch, on a part of the validation set.
        options: More of `TrainingConfig`, which makes another network of it.
    """
    from zeromean.training import TrainingConfig

    sizes = {
        "rest": settings.train_size,
        "validation": LOOK_SIZE,
        "test": settings.test_size,
    }
    data = {
        split: shared_networks.grey_images(settings.data, split, size, log)
        for split, size in sizes.items()
    }
    config = TrainingConfig(
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        lr=settings.lr,
        log_alpha_lr=settings.log_alpha_lr,
        seed=settings.seed,
        **options,
    )
    # Not the fields that an experiment adds, nor how it evaluates: the network is the same.
    names = {field.name for field in dataclasses.fields(Settings)} - {"num_samples", "seed"}
    training = {name: getattr(settings, name) for name in sorted(names)} | options
    identity = {"network": dataclasses.asdict(network), "settings": training}
    look_on = partial(watch, data["validation"])
    result = shared_networks.train(
        name, identity, network.build, data["rest"], config, log, on_epoch=look_on
    )
    return Trained(result.model, result.history, data["rest"], data["test"])


def measure(trained: Trained, settings: Settings) -> dict[str, Any]:
    """Everything the tables ask for."""
    model, _, train_set, test = trained
    data_term = log_likelihood(model, train_set)
    with torch.no_grad():
        kl = zm.kl_divergence(model).item()
        kl_approx = sum(approximate_kl(m) for m in zm.stochastic_layers(model).values())
    return {
        "elbo": data_term - kl,
        "data_term": data_term,
        "kl": kl,
        "kl_approx": kl_approx,
        "accuracy_1": accuracy(model, test, 1, seed=1),
        "accuracy_mean": accuracy(model, test, 1, sampler=zm.mean),
        "accuracy_averaged": accuracy(model, test, settings.num_samples, seed=2),
        "log_alpha": log_alphas(model),
    }


def compare(networks: Mapping[str, Network], settings: Settings, log: RunLog) -> dict[str, Any]:
    """Train networks and measure them all."""
    return {name: train_and_measure(name, networks[name], settings, log) for name in networks}


def train_and_measure(
    name: str, network: Network, settings: Settings, log: RunLog, **options: Any
) -> dict[str, Any]:
    """Train one network and measure it, each once, with its number of epochs next to the numbers.

    Options are those of `train`.
    """
    trained = train(name, network, settings, log, **options)
    measured = log.once(f"measure {name}", partial(measure, trained, settings))
    return {**measured, "epochs": settings.epochs}


def at_most(settings: SettingsT, epochs: int) -> SettingsT:
    """The same settings, with a schedule of at most so many epochs."""
    return dataclasses.replace(settings, epochs=min(settings.epochs, epochs))
