"""`zeromean demo`: what a variance network is, shown on small data in about a minute.

Read `digits.py` for how to build and evaluate one, `training.py` for how to train it, and `toy.py`
for what happens inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import zeromean as zm
from zeromean.data import toy_points
from zeromean.experiments.demo import digits, pictures, tables, toy
from zeromean.experiments.demo.training import train
from zeromean.models.toy import toy_network
from zeromean.prediction.classification import PredictiveUncertainty


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much work the demo does."""

    digits_epochs: int = 40
    toy_epochs: int = 300
    toy_points: int = 500
    """Points of each class."""
    toy_networks: int = 2
    """Initializations of the toy network: Figure 1 shows two."""
    draws: int = 10
    """Repetitions of every random evaluation."""
    num_samples: int = 50
    """Samples that are averaged at most."""


@dataclass(frozen=True)
class DemoResult:
    """The numbers behind the table and the pictures."""

    accuracies: dict[str, digits.Accuracies]
    uncertainties: dict[str, dict[str, PredictiveUncertainty]]
    """Of every network, for every kind of image, the familiar one first."""
    encodings: list[toy.Encoding]
    pictures: list[Path]
    record: Path
    """The numbers of both tables, as text."""


def run_demo(
    output: Path, *, seed: int = 0, sizes: Sizes = Sizes(), console: Console | None = None
) -> DemoResult:
    """Train, evaluate, draw, and say where pictures and numbers are.

    Args:
        output: A folder that exists.
        seed: Makes every number reproducible, without touching torch's global generator.
        console: Where the table goes; the progress bar goes to stderr.
    """
    console = console or Console()
    with (
        torch.random.fork_rng(devices=[]),
        Progress(console=Console(stderr=True, quiet=console.quiet)) as progress,
    ):
        data = digits.load()
        networks = {kind: _train_digits(kind, data, seed, sizes, progress) for kind in digits.KINDS}
        toys = [_train_toy(seed + i, sizes, progress) for i in range(sizes.toy_networks)]

        torch.manual_seed(seed)
        accuracies = {
            kind: digits.evaluate(
                model,
                data.test_images,
                data.test_labels,
                draws=sizes.draws,
                num_samples=sizes.num_samples,
            )
            for kind, model in networks.items()
        }
        images = {"test digits": data.test_images, **digits.foreign_images(data.test_images)}
        uncertainties = {
            kind: {
                name: zm.predictive_uncertainty(model, some, sizes.num_samples)
                for name, some in images.items()
            }
            for kind, model in networks.items()
        }
        encodings = [toy.encode(model, *toy_points(sizes.toy_points)) for model in toys]

    figures = {
        "accuracy.png": pictures.draw_accuracy(accuracies),
        "uncertainty.png": pictures.draw_uncertainty(images, uncertainties["variance"]),
        "toy.png": pictures.draw_toy(encodings),
    }
    paths = [pictures.save(figure, output / name) for name, figure in figures.items()]
    numbers = tables.Tables(
        tables.accuracy_rows(accuracies, sizes.draws),
        tables.separation_rows(uncertainties, sizes.num_samples),
    )
    numbers.print(console)
    record = numbers.write(output / "demo.json", seed=seed)
    for path in (*paths, record):
        console.print(f"wrote {path}", soft_wrap=True, highlight=False, markup=False)
    return DemoResult(accuracies, uncertainties, encodings, paths, record)


def _train_digits(
    kind: str, data: digits.Digits, seed: int, sizes: Sizes, progress: Progress
) -> nn.Sequential:
    torch.manual_seed(seed)
    model = digits.build_network(kind)
    train(
        model,
        data.train_images,
        data.train_labels,
        epochs=sizes.digits_epochs,
        lr=1e-2,
        batch_size=100,
        progress=progress,
        description=f"digits, {kind}",
    )
    return model


def _train_toy(seed: int, sizes: Sizes, progress: Progress) -> nn.Sequential:
    torch.manual_seed(seed)
    model = toy_network()
    points, labels = toy_points(sizes.toy_points)
    train(
        model,
        points,
        labels,
        epochs=sizes.toy_epochs,
        lr=1e-3,
        batch_size=200,
        progress=progress,
        description=f"toy problem, seed {seed}",
    )
    return model
