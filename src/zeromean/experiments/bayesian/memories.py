"""What a network keeps of the tasks before: nothing, or a penalty for moving away from them.

A memory gives the penalty that is added to the negative log-likelihood of the task at hand, in nats
for the whole of it, and is told when a task is over.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean.experiments.bayesian.layer_statistics import statistics


class Memory(Protocol):
    """What is asked of the past; `state` is what a checkpoint keeps of it."""

    state: dict[str, Any]

    def penalty(self, model: nn.Module) -> Tensor: ...

    def keep(self, model: nn.Module, inputs: Tensor) -> None:
        """The task with these inputs is over."""
        ...

    def prepare(self, model: nn.Module) -> None:
        """Make a new model ready for the state dict of one that a task has been kept in."""
        ...


class Nothing:
    """Fine-tuning: each task begins where the one before has ended."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def penalty(self, model: nn.Module) -> Tensor:
        return torch.zeros(())

    def keep(self, model: nn.Module, inputs: Tensor) -> None:
        pass

    def prepare(self, model: nn.Module) -> None:
        pass


class ElasticWeights(Nothing):
    """Elastic weight consolidation: a diagonal penalty around the end of every task.

    The sum over tasks of ½ strength · N · F (w − w*)² is one parabola, of which two sums are kept.
    Kirkpatrick et al. (2017).

    Args:
        strength: Factor of the penalty, the λ of the paper over N.
    """

    def __init__(self, strength: float):
        super().__init__()
        self.strength = strength

    def penalty(self, model: nn.Module) -> Tensor:
        total = torch.zeros(())
        for name, (curvature, centre) in self.state.items():
            moved = model.get_parameter(name) - centre
            total = total + 0.5 * (curvature * moved.square()).sum()
        return self.strength * total

    def keep(self, model: nn.Module, inputs: Tensor) -> None:
        fisher: dict[str, Any] = {}
        for layers in statistics(model, inputs):
            for name, (a, g) in layers.items():
                fisher[name] = fisher.get(name, 0) + g.square().T @ a.square()
        for name, new in fisher.items():
            key = f"{name}.weight"
            weight = model.get_parameter(key).detach().clone()
            old, centre = self.state.get(key, (torch.zeros_like(new), weight))
            curvature = old + new
            # Where no task said anything, there is nothing to hold, whatever the centre.
            mixed = (old * centre + new * weight) / curvature.clamp_min(1e-30)
            self.state[key] = (curvature, mixed)


class OnlineLaplace(Nothing):
    """Online Laplace with Kronecker factors: Gaussians around the latest weights.

    The precision is that of the prior N(0, 1) and of one term A ⊗ G a task. Ritter, Botev & Barber
    (2018).

    Args:
        strength: Factor of the terms.
    """

    def __init__(self, strength: float):
        super().__init__()
        self.strength = strength

    def penalty(self, model: nn.Module) -> Tensor:
        total = torch.zeros(())
        for name, weight in model.named_parameters():
            factors, centre = self.state.get(name, ([], None))
            moved = weight if centre is None else weight - centre
            total = total + 0.5 * moved.square().sum()
            for a, g in factors:
                total = total + 0.5 * self.strength * ((g @ moved @ a) * moved).sum()
        return total

    def keep(self, model: nn.Module, inputs: Tensor) -> None:
        sums: dict[str, list[Any]] = {}
        for layers in statistics(model, inputs):
            for name, (a, g) in layers.items():
                pair = sums.setdefault(name, [0, 0])
                pair[0] = pair[0] + a.T @ a
                pair[1] = pair[1] + g.T @ g
        for name, (a, g) in sums.items():
            key = f"{name}.weight"
            factors, _ = self.state.get(key, ([], None))
            # N E[aaᵀ] ⊗ E[ggᵀ]: one of the two sums is divided by N.
            factors = [*factors, (a / len(inputs), g)]
            self.state[key] = (factors, model.get_parameter(key).detach().clone())


class YesterdaysPosterior(Nothing):
    """Variational continual learning: the posterior becomes the prior. Nguyen et al. (2018)."""

    def penalty(self, model: nn.Module) -> Tensor:
        return zm.kl_divergence(model)

    def keep(self, model: nn.Module, inputs: Tensor) -> None:
        zm.become_prior_(model)

    def prepare(self, model: nn.Module) -> None:
        zm.become_prior_(model)
