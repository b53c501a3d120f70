"""Ten tasks that are one problem with its pixels in ten orders: who remembers the first?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeromean.experiments.bayesian import continual
from zeromean.experiments.bayesian.continual import figures
from zeromean.experiments.bayesian.tasks import Settings, Task, image_sets
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
    *continual.claims("ten tasks", (90.0, "90 with 100"), (92.0, "93 with 100"), gained=10.0),
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
    train, test = image_sets(config, log)
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
