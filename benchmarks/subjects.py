"""What is measured: a way to build a network, to train it by one step, to predict with it.

Every package, the deterministic floor included, is described by the same four fields.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from networks import Network
from torch import Tensor, nn

NUM_DATA = 60_000
LEARNING_RATE = 1e-3

Step = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Subject:
    """One package, used in one way.

    Attributes:
        build: makes the model from a network definition.
        trainer: makes the function that takes one training step, optimizer included.
        predict: class probabilities averaged over `num_samples` draws, `(batch, classes)`.
    """

    name: str
    build: Callable[[Network], Any]
    trainer: Callable[[Any], Step]
    predict: Callable[[Any, Tensor, int], Tensor]


def adam_trainer(loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Callable[[Any], Step]:
    """The training step of everybody who trains an `nn.Module` with a torch optimizer."""

    def trainer(model: nn.Module) -> Step:
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()

        return step

    return trainer


@torch.no_grad()
def predict_by_loop(model: Callable[[Tensor], Tensor], x: Tensor, num_samples: int) -> Tensor:
    """One full pass per sample: what every peer's examples do."""
    return torch.stack([model(x).softmax(-1) for _ in range(num_samples)]).mean(0)


DETERMINISTIC = Subject(
    name="deterministic",
    build=lambda network: network(nn.Conv2d, nn.Linear),
    trainer=adam_trainer(lambda model, x, y: F.cross_entropy(model(x), y)),
    predict=predict_by_loop,
)
