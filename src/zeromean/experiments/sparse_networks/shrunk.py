"""What the experiments on shrunk networks have in common: settings, training, and what counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.figure import figure, trace
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import measures

if TYPE_CHECKING:
    from zeromean.data import ImageSet
    from zeromean.training import Shrunk, Target


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Data, training and shrinking of a network."""

    dense_epochs: int = 12
    """Passes of the network before it is shrunk, by Adam with a rate that falls linearly."""
    lr: float = 1e-3
    """Adam's rate, of all trainings."""
    batch_size: int = 128
    """Images in a mini-batch."""
    epochs: int = 5
    """Passes of a step with noise, before twice as many without."""
    steps: int = 8
    """Steps at most."""
    pressure: float = 4.0
    """Nats per image that the network costs in the first step."""
    data: str = "mnist"
    """Data set: mnist, fashion-mnist, or digits (enlarged to 28 × 28)."""
    train_size: int = 55_000
    """Training images that are used, the first ones."""
    validation_size: int = 5000
    """Validation images, the last 5,000 of the training set, by which networks are chosen."""
    test_size: int = 10_000
    """Test images, which are looked at when everything is chosen."""
    seed: int = 0
    """Seed of the initialization, the batches and the noise."""


QUICK: dict[str, Any] = {
    "dense_epochs": 6,
    "train_size": 10_000,
    "validation_size": 2000,
    "test_size": 2000,
}
SMOKE: dict[str, Any] = {
    "dense_epochs": 1,
    "epochs": 1,
    "steps": 1,
    "data": "digits",
    "train_size": 200,
    "validation_size": 100,
    "test_size": 100,
}


class Sets:
    """The images of an experiment."""

    def __init__(self, settings: Settings, log: RunLog):
        sizes = {"rest": settings.train_size, "validation": settings.validation_size}
        sizes["test"] = settings.test_size
        images = {
            split: shared_networks.grey_images(settings.data, split, size, log)
            for split, size in sizes.items()
        }
        self.train: ImageSet = images["rest"]
        self.validation: ImageSet = images["validation"]
        self.test: ImageSet = images["test"]


def train_dense(
    name: str, build: Callable[[], nn.Module], settings: Settings, sets: Sets, log: RunLog
) -> nn.Module:
    """The network that is to be shrunk."""
    from zeromean.training import TrainingConfig

    config = TrainingConfig(
        epochs=settings.dense_epochs,
        batch_size=settings.batch_size,
        lr=settings.lr,
        seed=settings.seed,
    )
    identity = {
        "to shrink": name,
        "training": {k: v for k, v in config.described().items() if k != "seed"},
        "data": [settings.data, settings.train_size],
    }
    return shared_networks.train(name, identity, build, sets.train, config, log).model


def shrink(
    model: nn.Module,
    settings: Settings,
    sets: Sets,
    log: RunLog,
    *,
    name: str,
    target: Target | None = None,
    sparse_weights: bool = False,
) -> Shrunk:
    """`zeromean.training.shrink` with these settings, in a folder of the run."""
    from zeromean.training import TargetMissedWarning, TrainingConfig, shrink

    log.say(f"{name}: shrinking in {settings.steps} steps at most")
    with without(TargetMissedWarning):  # It stands in the metrics.
        return shrink(
            model,
            sets.train,
            sets.validation,
            target=target,
            config=TrainingConfig(
                epochs=settings.epochs,
                batch_size=settings.batch_size,
                lr=settings.lr,
                seed=settings.seed,
            ),
            steps=settings.steps,
            pressure=settings.pressure,
            sparse_weights=sparse_weights,
            folder=log.folder / f"shrink {name}",
            progress=log.progress,
        )


@contextmanager
def without(category: type[Warning]) -> Iterator[None]:
    """Without warnings of this kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category)
        yield


def times_faster(original: Path, small: Path, inputs: Tensor) -> float:
    """How many times faster onnxruntime runs a file than another one, on one thread."""
    from zeromean.compression.speed import milliseconds, onnx_calls

    paths = {"original": original, "small": small}
    times = milliseconds({name: onnx_calls(path, inputs) for name, path in paths.items()})
    return times["original"] / times["small"]


def results(shrunk: Shrunk, test: ImageSet) -> dict[str, Any]:
    """The chosen network next to the original, and the whole curve, on the test set."""
    errors = [measures.error(network.model, test) for network in shrunk.networks]
    best, original = shrunk.best, shrunk.original
    speedups = {
        key.replace(" ", "_"): original.milliseconds[key] / best.milliseconds[key]
        for key in original.milliseconds
    }
    onnx = {}
    if best.onnx_size is not None and original.onnx_size is not None:
        onnx = {"onnx_file": original.onnx_size / best.onnx_size, "onnx_bytes": best.onnx_size}
    return {
        "error_dense": errors[0],
        "error": errors[shrunk.chosen],
        "lost": errors[shrunk.chosen] - errors[0],
        "speedup": speedups,
        "file": shrunk.compression,
        "file_bytes": best.file_size,
        **onnx,
        "chosen": best.name,
        "reached": float(shrunk.reached),
        "curve": {
            "name": [network.name for network in shrunk.networks],
            "error": errors,
            "validation_error": [100 - network.score for network in shrunk.networks],
            "weights": [network.weights for network in shrunk.networks],
            "bytes": [network.file_size for network in shrunk.networks],
            **{
                f"speedup_{key.replace(' ', '_')}": [
                    original.milliseconds[key] / network.milliseconds[key]
                    for network in shrunk.networks
                ]
                for key in original.milliseconds
            },
        },
    }


def curves(title: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Error against speed-up and against bytes; `results` by label, one of each seed."""
    axes = {
        "speedup_onnxruntime_64": "times faster in onnxruntime, batches of 64",
        "bytes": "bytes of the file",
    }
    return [
        figure(
            title,
            label,
            "test error, %",
            [
                trace(name, found["curve"][axis], found["curve"]["error"])
                for name, seeds in results.items()
                for found in seeds
            ],
            x_log=True,
        )
        for axis, label in axes.items()
        if all(axis in found["curve"] for seeds in results.values() for found in seeds)
    ]


def structured(shrunk: Shrunk, loss: float) -> Shrunk:
    """Of the networks without sparse weights, the fastest one that loses no more than this."""
    from zeromean.training import Target

    networks = tuple(n for n in shrunk.networks if "sparse" not in n.name)
    target = Target(loss=loss)
    chosen = target.choose(networks[0], networks, shrunk.key, loss)
    reached = chosen > 0 and target.is_met(networks[0], networks[chosen], shrunk.key, loss)
    return replace(shrunk, networks=networks, chosen=chosen, reached=reached)
