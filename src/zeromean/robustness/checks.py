"""Whether an attack's failure is the network's merit, or gradients that lead nowhere.

The signs of masked gradients of Athalye et al. (2018), "Obfuscated gradients give a false sense of
security", and Carlini et al. (2019), "On evaluating adversarial robustness".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from torch import Tensor

from zeromean.arguments import require_integer
from zeromean.extras import how_to_install
from zeromean.prediction.probabilities import OutputKind
from zeromean.prediction.sources import Source
from zeromean.robustness.adapter import draws_noise, kept_networks
from zeromean.robustness.auto_attack import autoattack
from zeromean.robustness.examples import AdversarialExamples, random_noise
from zeromean.robustness.judgement import judge
from zeromean.robustness.pgd import eot_pgd, usual_step
from zeromean.text_table import text_table

Verdict = Literal["ok", "suspicious", "not run"]
# An attack without bounds can show any image it likes; some draws of a judge may still miss.
_ALL = 0.99
# Standard errors by which the stronger of two attacks may be behind.
_TOLERANCE = 2.0


@dataclass(frozen=True)
class Check:
    """One comparison of two attacks.

    Attributes:
        name: What should hold.
        weaker: The part of the images that the attack which should be weaker gets misclassified.
        stronger: The same of the other one.
        reason: Why it was not run, or what it is about.
    """

    name: str
    weaker: float | None
    stronger: float | None
    verdict: Verdict
    reason: str = ""


def gradient_masking_checks(
    model: Source,
    images: Tensor,
    labels: Tensor,
    *,
    epsilon: float,
    attack: AdversarialExamples | None = None,
    num_steps: int = 40,
    num_samples: int | None = None,
    num_queries: int = 500,
    judge_samples: int | None = None,
    outputs: OutputKind | None = None,
    seed: int = 0,
    batch_size: int = 100,
    progress: bool = True,
) -> list[Check]:
    """Five comparisons that hold where gradients are worth something; `checks_table` prints them.

    Args:
        attack: What `eot_pgd` made of the same images within epsilon. Default: it is run.
        num_queries: Of Square, the attack without gradients (extra `attacks`).
        judge_samples: Draws a verdict, as `num_samples` of `judge`.

    The other arguments are those of `eot_pgd`.
    """
    num_steps = require_integer("num_steps", num_steps, at_least=2)
    networks = kept_networks(model)
    common: dict[str, Any] = {
        "outputs": outputs,
        "seed": seed,
        "batch_size": batch_size,
        "progress": progress,
    }

    def pgd(**options: Any) -> AdversarialExamples:
        options = {"epsilon": epsilon, "num_steps": num_steps, "num_samples": num_samples} | options
        return eot_pgd(networks, images, labels, **options, **common)

    white = pgd() if attack is None else attack
    num_samples = white.num_samples  # What it says of a model without noise is said once.
    made = {"white": white, "noise": random_noise(images, epsilon, seed=seed)}
    few_steps = max(1, num_steps // 8)
    # As long a step as the full attack has: the same, cut short.
    step = usual_step(epsilon, num_steps) if epsilon > 0 else None
    made["few steps"] = pgd(num_steps=few_steps, step=step)
    noisy = draws_noise(networks, images)
    if noisy and white.num_samples > 1:
        made["one sample"] = pgd(num_samples=1)
    made["unbounded"] = pgd(epsilon=1.0)
    # Networks that are very sure have no gradient of the cross-entropy left; this is not masking.
    made["unbounded, margin"] = pgd(epsilon=1.0, loss="margin")
    has_square = find_spec("pyautoattack") is not None
    if has_square:
        (made["black"],) = autoattack(
            networks,
            images,
            labels,
            epsilon=epsilon,
            attacks=["square"],
            num_queries=num_queries,
            num_samples=num_samples,
            **common,
        )
    judged = judge(
        networks, images, labels, made, num_samples=judge_samples, outputs=outputs, seed=seed + 1
    )
    errors = {name: ~correct for name, correct in judged.correct.items()}
    checks = []
    name = "white box is not weaker than black box"
    if has_square:
        checks.append(_compared(name, errors["black"], errors["white"], f"Square, {num_queries}"))
    else:
        needs = how_to_install("Square needs pyautoattack", "attacks")
        checks.append(Check(name, None, None, "not run", needs))
    name = "success rises with steps"
    reason = f"{few_steps} and {num_steps}"
    checks.append(_compared(name, errors["few steps"], errors["white"], reason))
    name = "success rises with samples"
    if "one sample" in errors:
        reason = f"1 and {white.num_samples}"
        checks.append(_compared(name, errors["one sample"], errors["white"], reason))
    else:
        reason = "one draw a gradient" if noisy else "the model draws no noise"
        checks.append(Check(name, None, None, "not run", reason))
    reached = (errors["unbounded"] | errors["unbounded, margin"]).double().mean().item()
    verdict: Verdict = "ok" if reached >= _ALL else "suspicious"
    checks.append(Check("without a bound it reaches 100%", None, reached, verdict, "epsilon = 1"))
    reason = f"epsilon = {epsilon:.3g}"
    checks.append(_compared("stronger than random noise", errors["noise"], errors["white"], reason))
    return checks


def checks_table(checks: Sequence[Check]) -> str:
    """Lines to print: what should hold, the errors of both attacks, the verdict."""
    rows = [["check", "weaker", "stronger", "verdict", "of"]]
    for check in checks:
        values = ["" if v is None else f"{100 * v:.1f}%" for v in (check.weaker, check.stronger)]
        rows.append([check.name, *values, check.verdict, check.reason])
    return "\n".join(text_table(rows, left=(0, 3, 4)))


def _compared(name: str, weaker: Tensor, stronger: Tensor, reason: str) -> Check:
    """Whether the stronger attack is at least as strong, on the same images, up to chance."""
    gain = stronger.double() - weaker.double()
    stderr = gain.std(unbiased=False) / len(gain) ** 0.5
    behind = bool(gain.mean() < -_TOLERANCE * stderr) and bool(gain.mean() < 0)
    verdict: Verdict = "suspicious" if behind else "ok"
    below, above = (errors.double().mean().item() for errors in (weaker, stronger))
    return Check(name, below, above, verdict, reason)
