"""Tasks that are learned one after the other, and how a run learns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from zeromean.experiments.runs.log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Networks, training and what is kept; the same passes for all methods."""

    num_tasks: int
    """Tasks."""
    hidden: tuple[int, ...]
    """Units of the hidden layers; no biases, which would have no prior."""
    epochs: int = 20
    """Passes over every task."""
    batch_size: int = 256
    """Images in a mini-batch."""
    lr: float = 1e-3
    """Adam's learning rate of deterministic networks; it falls linearly to zero in every task."""
    vcl_lr: float = 3e-3
    """The same of the means of VCL."""
    log_variance_lr: float = 1e-2
    """The same of its log-variances."""
    log_variance: float = -10.0
    """Log-variance of its weights at the start of the first task."""
    prior_scale: float = 0.1
    """Standard deviation of its prior in the first task."""
    coreset_size: int
    """Images that are kept of a task."""
    coreset_steps: int = 100
    """Steps over all that was kept, on a copy, before it predicts."""
    ewc: float = 30.0
    """Factor of the penalty of EWC."""
    laplace: float = 1.0
    """Factor of the penalty of online Laplace."""
    train_size: int | None = None
    """Images to train on; None for all."""
    num_samples: int = 10
    """Samples of a prediction of VCL."""
    evaluate: str = "test"
    """Images that accuracies are of; all choices were made on "validation"."""
    data: str = "mnist"
    """Data set."""
    seed: int = 0
    """Seed of the tasks, the networks, the batches, the noise and what is kept."""


@dataclass(frozen=True)
class Task:
    """Rows of pixels, and their labels; made when asked for, as ten copies would take memory."""

    train: Callable[[], tuple[Tensor, Tensor]]
    evaluate: Callable[[], tuple[Tensor, Tensor]]


def image_sets(config: Settings, log: RunLog) -> tuple[ImageSet, ImageSet]:
    """The images that tasks are made of: to train on, and those that accuracies are of."""
    from zeromean import data

    split = "test" if config.evaluate == "test" else "validation"
    train, evaluate = (
        data.load(config.data, part, data_dir=log.data_dir) for part in ("rest", split)
    )
    return train, evaluate
