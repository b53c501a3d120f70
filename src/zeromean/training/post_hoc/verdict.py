"""What came of it, on examples that chose nothing, and whether it is worse than what there was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeromean.training.post_hoc.contest import CHANCE, Entry, more
from zeromean.training.post_hoc.examples import Examples
from zeromean.training.post_hoc.report import COST
from zeromean.training.post_hoc.tasks import Task, calibrated_nll, samples_of, wrapped
from zeromean.uncertainty import auroc


@dataclass(frozen=True)
class Verdict:
    """An entry on examples that chose nothing.

    Attributes:
        table: What the table says of it.
        nll: By example.
        mistakes: By example.
        known: How unsure it is of the examples.
        foreign: How unsure it is of foreign ones, where there are any.
    """

    table: dict[str, float]
    nll: Tensor
    mistakes: Tensor
    known: Tensor
    foreign: Tensor | None


def judged(task: Task, entry: Entry, examples: Examples, foreign: Any, seed: int) -> Verdict:
    """Predict the examples, and the foreign inputs where there are any."""
    model = wrapped(task, entry.model, entry.scale)
    samples = samples_of(model, examples.inputs, entry.num_samples, seed)
    nll = task.nll(samples, examples.targets)
    known, unknown = task.unsureness(samples), None
    table = task.measures(samples, examples.targets)
    table["NLL"] = nll.mean().item()
    table["calibrated NLL"] = calibrated_nll(task, samples, examples.targets, seed)
    if foreign is not None:
        unknown = task.unsureness(samples_of(model, foreign, entry.num_samples, seed))
        table["AUROC"] = auroc(known, unknown)
    table[COST] = entry.row.cost
    return Verdict(table, nll, task.mistakes(samples, examples.targets), known, unknown)


def why_worse(before: Verdict, after: Verdict) -> str | None:
    """In which respect what came after is worse than what was before; None where in none.

    Mistakes and AUROC may be worse by what chance does to them.
    """
    if after.nll.mean() > before.nll.mean():
        return "its predictions are less likely"
    if more(after.mistakes, before.mistakes):
        return "it makes more mistakes"
    if before.foreign is not None and after.foreign is not None:
        ranks = _ranks(after.known, after.foreign)
        others = _ranks(before.known, before.foreign)
        of_known = _ranks(before.foreign, before.known)
        # DeLong's standard error.
        error = (others.var() / len(others) + of_known.var() / len(of_known)).sqrt()
        if ranks.mean() < others.mean() - CHANCE * error:
            return "it tells foreign inputs less well"
    return None


def _ranks(known: Tensor, foreign: Tensor) -> Tensor:
    """For each foreign input the share of the known ones of which the model is surer."""
    return torch.searchsorted(known.sort().values, foreign.contiguous()).double() / len(known)
