"""Candidates judged on the examples that choose: the best one so far, and a row for each."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeromean.training.post_hoc.dropout import without_dropout_
from zeromean.training.post_hoc.examples import Examples
from zeromean.training.post_hoc.report import Candidate
from zeromean.training.post_hoc.tasks import Task, fitted_scale, samples_of

# Standard errors of a difference by which more mistakes are more, and not chance.
CHANCE = 1.5


@dataclass(frozen=True)
class Entry:
    """A candidate with what it needs to predict.

    Attributes:
        model: Not wrapped yet.
        scale: Its temperature.
        num_samples: Draws for a prediction; None where nothing is random.
        harmless: Whether it makes no more mistakes than the network as it came, but by chance.
    """

    model: nn.Module
    scale: float
    num_samples: int | None
    row: Candidate
    harmless: bool


class Contest:
    """Judges by the likelihood at the best temperature; who makes more mistakes is out.

    The first entry is the network as it came, with a temperature. `trained` is the one trained on,
    with nothing random, which what is better than both is to be told from.

    Args:
        plain: That network, against which mistakes are counted.
        seed: Of all draws: candidates are compared under the same noise.
    """

    def __init__(self, task: Task, examples: Examples, plain: nn.Module, *, seed: int):
        self.task = task
        self.examples = examples
        self.seed = seed
        self.rows: list[Candidate] = []
        samples = samples_of(plain, examples.inputs, None, seed)
        self.mistakes = task.mistakes(samples, examples.targets)
        self.enter("temperature", plain, None, cost=1.0, passes=0.0)

    def enter(
        self, name: str, model: nn.Module, num_samples: int | None, *, cost: float, passes: float
    ) -> Entry:
        """Judge one more candidate."""
        model = without_dropout_(copy.deepcopy(model))
        samples = samples_of(model, self.examples.inputs, num_samples, self.seed)
        targets = self.examples.targets
        scale = fitted_scale(self.task, samples, targets)
        nll = self.task.nll(samples, targets, scale).mean().item()
        row = Candidate(name, nll, cost, passes)
        self.rows.append(row)
        harmless = not more(self.task.mistakes(samples, targets), self.mistakes)
        entry = Entry(model, scale, num_samples, row, harmless)
        if len(self.rows) == 1:
            self.first = self.best = self.trained = entry
        if harmless and nll < self.best.row.nll:
            self.best = entry
        return entry


def more(these: Tensor, those: Tensor) -> bool:
    """Whether these are more than those, by more than chance does to as many examples."""
    difference = (these - those).double()
    error = difference.std() / len(difference) ** 0.5
    return bool(difference.mean() > CHANCE * torch.nan_to_num(error))
