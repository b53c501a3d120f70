"""Ten tasks that are one problem with its pixels in ten orders: who remembers the first?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeromean.experiments.bayesian import continual
from zeromean.experiments.bayesian.continual import VCL, WITH_CORESET, Settings, Task, figures
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Learning over time: permuted MNIST, ten tasks"
SOURCE = "lectures on Bayesian networks; Nguyen et al. (2018), section 6.1"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("chirkova: on-line learning", "molchanov: on-line learning")
__all__ = ["figures"]


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """One network without biases for all tasks, all of which have the ten digits."""

    num_tasks: int = 10
    """Orders of the pixels."""
    hidden: tuple[int, ...] = (100, 100)
    """Units of the hidden layers; no biases, which would have no prior."""
    coreset_size: int = 200
    """Images that are kept of a task."""
    ewc: float = 30.0
    """Factor of the penalty of EWC."""
    laplace: float = 1.0
    """Factor of the penalty of online Laplace."""


QUICK = Config(num_tasks=3, train_size=10_000, epochs=5)
SMOKE = Config(
    num_tasks=2,
    hidden=(32,),
    epochs=2,
    batch_size=100,
    coreset_size=20,
    coreset_steps=5,
    num_samples=2,
    data="digits",
)
CLAIMS = [
    Claim(
        f"accuracy.{VCL}",
        90.0,
        ours("Nguyen et al. (2018) have 90 with 100 passes"),
        0.0,
        "at least",
        "mean over ten tasks: VCL",
        "%",
    ),
    Claim(
        f"accuracy.{WITH_CORESET}",
        92.0,
        ours("Nguyen et al. (2018) have 93 with 100 passes"),
        0.0,
        "at least",
        "mean over ten tasks: VCL with coreset",
        "%",
    ),
    Claim(
        "gained_over_fine_tuning",
        10.0,
        ours("the control: without a memory the first tasks are forgotten"),
        0.0,
        "at least",
        "VCL above fine-tuning",
        "points",
    ),
    Claim(
        "gained_over_coreset",
        0.0,
        ours("what was kept must not be all that there is to it"),
        0.0,
        "at least",
        "VCL with coreset above the coreset alone",
        "points",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean import data

    split = "test" if config.evaluate == "test" else "validation"
    train = data.load(config.data, "rest", data_dir=log.data_dir)
    test = data.load(config.data, split, data_dir=log.data_dir)
    pixels = train.images[0].numel()
    tasks = [
        Task(
            partial(_permuted, train, _order(config.seed, number, pixels), config.train_size),
            partial(_permuted, test, _order(config.seed, number, pixels), None),
        )
        for number in range(config.num_tasks)
    ]
    classes = train.num_classes
    return continual.compare(partial(_network, pixels, config.hidden, classes), tasks, config, log)


def _network(
    pixels: int, hidden: tuple[int, ...], classes: int, layer: Callable[..., nn.Module]
) -> nn.Module:
    from zeromean.models import mlp

    return mlp((pixels, *hidden, classes), layer)


def _order(seed: int, number: int, pixels: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return torch.randperm(pixels, generator=generator)


def _permuted(images: ImageSet, order: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    rows = images.images.flatten(1)[:size]
    return rows[:, order], images.labels[:size]
