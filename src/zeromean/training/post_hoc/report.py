"""What adding uncertainty did: a table of before and after, and the candidates that were tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from zeromean.text_table import text_table
from zeromean.training.likelihoods import Likelihood

COST = "passes for a prediction"


@dataclass(frozen=True)
class Candidate:
    """One way to uncertainty, and how it did on the examples that choose.

    Attributes:
        name: Which layers are random, and how.
        nll: Negative log-likelihood with the best temperature.
        cost: Passes of the plain network that a prediction costs, counted in operations.
        passes: Passes over the training set that it was trained for.
    """

    name: str
    nll: float
    cost: float
    passes: float


@dataclass(frozen=True)
class AddedUncertainty:
    """What `add_uncertainty` returns; printed, it is the table of before and after.

    Attributes:
        model: Predicts with `zm.predict_proba` or `zm.predict_moments` and `num_samples` draws; a
            `zeromean.ensembles.Ensemble` where it is two networks; the model that was given, itself
            and untouched, where nothing made it better.
        chosen: The candidate that the model is.
        num_samples: Draws for a prediction, from each network; the table is of so many.
        likelihood: For `zm.predict_moments`; None for classes, and where nothing was added.
        before: What the table says of the model that was given.
        temperature: The same with one temperature (for a regression one noise variance) and
            nothing random.
        trained_on: The same of the network trained on as it was trained before: what the passes
            alone are worth.
        after: The same of `model`.
        candidates: All that was tried, in this order.
        rejected: Why what looked best was not returned; empty where it was.
        chosen_on: Validation examples that chose.
        reported_on: Other ones, which the table is about.
    """

    model: nn.Module
    chosen: str
    num_samples: int
    likelihood: Likelihood | None
    before: Mapping[str, float]
    temperature: Mapping[str, float]
    trained_on: Mapping[str, float]
    after: Mapping[str, float]
    candidates: tuple[Candidate, ...]
    rejected: tuple[str, ...]
    chosen_on: int
    reported_on: int

    @property
    def added(self) -> bool:
        """Whether `model` is another one than was given."""
        return self.chosen != AS_IT_WAS

    def __str__(self) -> str:
        columns = [self.before, self.temperature, self.trained_on, self.after]
        rows = [["", "before", "temperature", "trained on", "after"]]
        rows += [[name, *(_shown(name, each[name]) for each in columns)] for name in self.after]
        samples = "" if self.num_samples == 1 else f", {self.num_samples} samples"
        about = f"on {self.reported_on} validation examples that chose nothing:"
        return "\n".join([self.chosen + samples, *self.rejected, about, *text_table(rows)])

    @property
    def tried(self) -> str:
        """A table of the candidates."""
        rows = [["", "calibrated NLL", COST, "passes of training"]]
        rows += [
            [each.name, f"{each.nll:.4f}", f"{each.cost:.2f}", f"{each.passes:g}"]
            for each in self.candidates
        ]
        return "\n".join([f"on the {self.chosen_on} examples that chose:", *text_table(rows)])


AS_IT_WAS = "the model as it was"


def _shown(name: str, value: float) -> str:
    if name.endswith("%"):
        return f"{value:.2f}"
    return f"{value:.2f}" if name == COST else f"{value:.4f}"
