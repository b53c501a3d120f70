"""Five tasks, each two digits to tell apart, with a head of its own on a body that all share."""

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
from zeromean.experiments.runs.log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Learning over time: split MNIST, five tasks with heads of their own"
SOURCE = "lectures on Bayesian networks; Nguyen et al. (2018), section 6.1"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("chirkova: on-line learning", "molchanov: on-line learning")
__all__ = ["figures"]


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """A body for all tasks and a head of two outputs for each."""

    num_tasks: int = 5
    """Pairs of digits: 0 and 1, 2 and 3, …"""
    hidden: tuple[int, ...] = (256, 256)
    """Units of the hidden layers; no biases, which would have no prior."""
    prior_scale: float = 1.0
    """Standard deviation of their prior in the first task."""
    coreset_size: int = 40
    """Images that are kept of a task."""


QUICK = Config(train_size=2000, epochs=5)
SMOKE = Config(
    num_tasks=2,
    hidden=(32,),
    epochs=2,
    batch_size=50,
    coreset_size=10,
    coreset_steps=5,
    num_samples=2,
    data="digits",
)
CLAIMS = continual.claims(
    "five tasks", (97.0, "97.0 with 120"), (97.0, "98.4 with 120"), gained=0.0
)


def run(config: Config, log: RunLog) -> dict[str, Any]:
    train, test = image_sets(config, log)
    if not 1 <= config.num_tasks <= train.num_classes // 2:
        raise ValueError(
            f"num_tasks must lie between 1 and {train.num_classes // 2}, the pairs of digits, got "
            f"{config.num_tasks}."
        )
    tasks = [
        Task(partial(_pair, train, number, config.train_size), partial(_pair, test, number, None))
        for number in range(config.num_tasks)
    ]
    widths = (train.images[0].numel(), *config.hidden)
    return continual.compare(partial(_network, widths), tasks, config, log)


def _network(widths: tuple[int, ...], layer: Callable[..., nn.Module]) -> nn.Module:
    from zeromean.models import MultiHead, mlp

    body = nn.Sequential(mlp(widths, layer), nn.ReLU())
    return MultiHead(body, [layer(widths[-1], 2)])


def _pair(images: ImageSet, number: int, size: int | None) -> tuple[Tensor, Tensor]:
    """The images of two digits, labelled 0 and 1."""
    labels = images.labels - 2 * number
    chosen = torch.nonzero((labels >= 0) & (labels < 2)).flatten()[:size]
    return images.images[chosen].flatten(1), labels[chosen]
