"""Snapshot ensembles: one training whose learning rate starts again, and a member at each end.

Huang et al. (2017), "Snapshot ensembles: train 1, get M for free".
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zeromean.arguments import require_integer, require_model
from zeromean.prediction.ensemble import Ensemble
from zeromean.prediction.sources import States
from zeromean.training.randomness import derived_seed

if TYPE_CHECKING:
    from zeromean.data import ImageSet
    from zeromean.training.config import TrainingConfig


@dataclass(frozen=True)
class CosineCycles:
    """Factors of the learning rate that fall from 1 towards 0 as a cosine, again and again.

    For `torch.optim.lr_scheduler.LambdaLR`, stepped after every mini-batch.

    Args:
        num_steps: Mini-batches in the whole training.
        num_cycles: How often the rate starts again, which is how many snapshots there are.
    """

    num_steps: int
    num_cycles: int

    def __post_init__(self):
        steps = require_integer("num_steps", self.num_steps, at_least=1)
        cycles = require_integer("num_cycles", self.num_cycles, at_least=1)
        if cycles > steps:
            raise ValueError(f"{cycles} cycles need at least as many steps, got {steps}.")

    def __call__(self, step: int) -> float:
        """The factor at a step, counted from 0."""
        cycle = self._cycle(step)
        first, last = self._first(cycle), self._first(cycle + 1)
        return (math.cos(math.pi * (step - first) / (last - first)) + 1) / 2

    def ends_cycle(self, step: int) -> bool:
        """Whether a snapshot is due after this step, counted from 0."""
        return self._first(self._cycle(step) + 1) == step + 1

    def _cycle(self, step: int) -> int:
        step = min(step, self.num_steps - 1)  # LambdaLR asks once more after the last one.
        return ((step + 1) * self.num_cycles - 1) // self.num_steps

    def _first(self, cycle: int) -> int:
        """The first step of a cycle; cycles differ by one step at most."""
        return cycle * self.num_steps // self.num_cycles


class Snapshots:
    """States of a model that is being trained, each a network of the ensemble.

    `zm.predict_proba(snapshots, x)` and the like take it as it is.

    Args:
        model: The model that is trained; it is left as it is.
    """

    def __init__(self, model: nn.Module):
        require_model(model)
        self.model = model
        self.states: list[dict[str, Tensor]] = []

    def take(self) -> None:
        """Keep a copy of the model's parameters and buffers as they are now."""
        state = self.model.state_dict()
        self.states.append({name: tensor.detach().clone() for name, tensor in state.items()})

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[nn.Module]:
        """The networks one after the other, each valid until the next is asked for."""
        if not self.states:
            raise ValueError("There are no snapshots yet; call take() at the end of each cycle.")
        return iter(States(self.model, self.states))

    def ensemble(self) -> Ensemble:
        """All of them at once, as networks of their own."""
        return Ensemble([copy.deepcopy(network).eval() for network in self])


def fit_snapshots(
    model: nn.Module,
    train: ImageSet,
    config: TrainingConfig,
    *,
    folder: str | os.PathLike[str],
    num_cycles: int = 5,
    **options: Any,
) -> Ensemble:
    """Train a model with `zeromean.training.fit` several times on end; resumes by itself.

    Each cycle starts from the weights of the one before, and with the full learning rate again. The
    model is trained in place.

    Args:
        config: That of one cycle: `epochs` are those of a cycle, and its rate should end at zero
            (`decay="linear"` or `"one-cycle"`).
        folder: Cycles train in `folder/cycle-0` and so on.
        options: As `fit` takes them: test, callbacks, progress, on_epoch, augment.
    """
    from zeromean.training.trainer import fit

    require_model(model)
    num_cycles = require_integer("num_cycles", num_cycles, at_least=1)
    members = []
    for cycle in range(num_cycles):
        # Else every cycle would see the same batches and the same noise.
        seed = config.seed if cycle == 0 else derived_seed(config.seed, cycle)
        fit(
            model,
            train,
            replace(config, seed=seed),
            folder=Path(folder, f"cycle-{cycle}"),
            **options,
        )
        members.append(copy.deepcopy(model).eval())
    return Ensemble(members)
