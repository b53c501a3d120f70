"""Attacks, their judge, and checks that their failures mean something, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zeromean.prediction.probabilities import OutputKind
from zeromean.prediction.sources import Source
from zeromean.robustness.adapter import kept_networks
from zeromean.robustness.auto_attack import autoattack
from zeromean.robustness.checks import Check, checks_table, gradient_masking_checks
from zeromean.robustness.examples import AdversarialExamples
from zeromean.robustness.judgement import Judgement, judge
from zeromean.robustness.pgd import eot_pgd


@dataclass(frozen=True)
class RobustnessReport:
    """What is left of a classifier under attack, and whether to believe it. `print` shows both."""

    epsilon: float
    judgement: Judgement
    checks: list[Check]
    attacked: list[AdversarialExamples]
    """What the attacks made, in the order of the judgement."""

    @property
    def suspicious(self) -> list[Check]:
        """The checks that fail: with one of them, nothing above is a measure of robustness."""
        return [check for check in self.checks if check.verdict == "suspicious"]

    def __str__(self) -> str:
        lines = [f"epsilon = {self.epsilon:.4g}; {self.judgement}", "", checks_table(self.checks)]
        if self.suspicious:
            names = "; ".join(check.name for check in self.suspicious)
            lines += ["", f"suspicious: not so: {names}. The attacks may be too weak."]
        return "\n".join(lines)


def evaluate(
    model: Source,
    images: Tensor,
    labels: Tensor,
    *,
    epsilon: float,
    attacks: str | Sequence[str] = (),
    num_steps: int = 40,
    num_samples: int | None = None,
    num_queries: int = 500,
    judge_samples: int | None = None,
    outputs: OutputKind | None = None,
    seed: int = 0,
    batch_size: int = 100,
    progress: bool = True,
) -> RobustnessReport:
    """Attack a classifier with EoT-PGD and others, judge what they found, check the gradients.

    Args:
        attacks: More of them, as `autoattack` takes their names: "rand", say (extra `attacks`).
        num_steps: Gradients of each attack.
        num_queries: Queries of Square.
        judge_samples: Draws a verdict, as `num_samples` of `judge`.

    The other arguments are those of `eot_pgd`.
    """
    networks = kept_networks(model)
    common: dict[str, Any] = {
        "epsilon": epsilon,
        "num_steps": num_steps,
        "num_samples": num_samples,
        "outputs": outputs,
        "seed": seed,
        "batch_size": batch_size,
        "progress": progress,
    }
    made = [eot_pgd(networks, images, labels, **common)]
    common["num_samples"] = made[0].num_samples  # A model without noise is told of once.
    if attacks:
        made += autoattack(
            networks, images, labels, attacks=attacks, num_queries=num_queries, **common
        )
    judgement = judge(
        networks, images, labels, made, num_samples=judge_samples, outputs=outputs, epsilon=epsilon
    )
    checks = gradient_masking_checks(
        networks,
        images,
        labels,
        attack=made[0],
        num_queries=num_queries,
        judge_samples=judge_samples,
        **common,
    )
    return RobustnessReport(epsilon, judgement, checks, made)
