"""The phase transition of Figures 3 and 8, in which information moves from means to variances."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from zeromean.experiments.networks import evaluation
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER
from zeromean.experiments.runs.figure import figure, over_seeds

if TYPE_CHECKING:
    from zeromean.data import ImageSet

# Student's t by one sample of its KL, as the paper did it.
SLOW = "student-t-sample"
# Per cent of the images: below it the means have lost what they knew.
TRANSITION = 50.0
CURVES = {
    "accuracy_mean": "deterministic",
    "accuracy_sample": "sample",
    "accuracy_ensemble": "ensemble",
    "accuracy_zero_mean": "zero-mean",
}
SLOW_CLAIM = Claim(
    "slow_over_log_uniform",
    1.0,
    PAPER("Figure 8, “slower”"),
    0.0,
    "at least",
    "passes to the transition with one sample of Student's t, over those of log-uniform",
)


def require_priors(priors: Sequence[str], known: Collection[str]) -> None:
    unknown = [prior for prior in priors if prior not in known]
    if unknown:
        raise ValueError(f"there is no prior {unknown[0]!r}; choose from {', '.join(known)}.")


def slowness(results: Mapping[str, Any], passes: str) -> dict[str, float]:
    """How many times as many passes the slow prior takes, where both are there."""
    if not {"log-uniform", SLOW} <= results.keys():
        return {}
    return {"slow_over_log_uniform": results[SLOW][passes] / results["log-uniform"][passes]}


def accuracy_without_means(model: nn.Module, test: ImageSet, num_samples: int) -> float:
    dropped, _ = evaluation.drop_means(model, test.images[:10])
    assert dropped is not None
    return evaluation.accuracy(dropped, test, num_samples, seed=2)


def accuracy_figure(
    prior: str, pass_label: str, curves: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, Any]:
    """The four accuracies by pass.

    Args:
        curves: Those of every seed.
    """
    passes = list(range(1, len(curves[0]["accuracy_mean"]) + 1))
    return figure(
        f"{prior} prior",
        pass_label,
        "accuracy on validation images, %",
        [over_seeds(label, passes, [c[key] for c in curves]) for key, label in CURVES.items()],
    )
