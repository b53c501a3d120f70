"""A moving average of the weights: what a run ends with where Adam's own noise matters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from zeromean.training.sharding import local, placed_like


class WeightAverage:
    """Exponential moving average of the parameters and of the buffers that are not counters.

    Args:
        model: What is averaged. Its tensors stay where they are; the average has its own.
        num_steps: Time constant.
    """

    def __init__(self, model: nn.Module, num_steps: float):
        self.model = model
        self.num_steps = num_steps
        names: dict[Tensor, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names.setdefault(tensor, name)  # Tied layers have one average.
        self.tensors = {
            name: tensor.detach().clone()
            for tensor, name in names.items()
            if tensor.is_floating_point()
        }

    def follow_model(self) -> None:
        """Move the average to where the model is: to its device, and into shards."""
        state = self.model.state_dict()
        self.tensors = {name: placed_like(t, state[name]) for name, t in self.tensors.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights in after a step, counted from 0."""
        # Early on the average is over all steps so far: it would take long to forget the start.
        decay = min(math.exp(-1 / self.num_steps), (1 + step) / (10 + step))
        state = self.model.state_dict()
        averages = [local(tensor) for tensor in self.tensors.values()]
        weights = [local(state[name]) for name in self.tensors]
        get_ema_multi_avg_fn(decay)(averages, weights, step)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The model with the average for its weights."""
        self.swap_()
        try:
            yield
        finally:
            self.swap_()

    @torch.no_grad()
    def swap_(self) -> None:
        state = self.model.state_dict()
        for name, tensor in self.tensors.items():
            weight, average = local(state[name]), local(tensor)
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from the tensors of a checkpoint."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(placed_like(tensor, self.tensors[name]))


@torch.no_grad()
def put_average_(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put the averages of a checkpoint in the places of the weights, tied ones included."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        state[name].copy_(tensor)
