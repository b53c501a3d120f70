"""Figure 7's attack, and attacks that average over the noise, on groups of networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.robustness import (
    autoattack,
    detect,
    eot_pgd,
    gradient_masking_checks,
    iterative_fast_sign,
    judge,
)

if TYPE_CHECKING:
    from zeromean.data import ImageSet


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which attacks, and how strong they are."""

    attacked: int = 500
    """Test images that are attacked, the first ones."""
    iterations: int = 100
    """Steps of the paper's attack."""
    step: float = 0.5
    """How far a pixel goes in one of them, of 255."""
    num_samples: int = 10
    """Draws that the paper's attack and its success average over, those of all members together."""
    epsilons: tuple[int, ...] = (2, 4, 8)
    """How far EoT-PGD may go, of 255. The last one is that of AutoAttack and of the checks."""
    pgd_steps: int = 40
    """Gradients of EoT-PGD."""
    pgd_samples: int = 20
    """Draws of each network that a gradient averages over."""
    judge_samples: int = 100
    """Draws of each network that a verdict averages over."""
    autoattack_images: int = 100
    """Of the images, those that AutoAttack-rand and the checks have."""
    autoattack_steps: int = 100
    """Gradients of each of its attacks."""
    queries: int = 1000
    """Queries of Square, in the checks."""


SMOKE: dict[str, Any] = {
    "attacked": 8,
    "iterations": 2,
    "epsilons": (8,),
    "pgd_steps": 2,
    "pgd_samples": 2,
    "num_samples": 2,
    "judge_samples": 4,
    "autoattack_images": 4,
    "autoattack_steps": 2,
    "queries": 5,
}


def attack(
    name: str,
    networks: Sequence[nn.Module],
    noisy: bool,
    test: ImageSet,
    settings: Settings,
    log: RunLog,
    *,
    seed: int,
) -> dict[str, Any]:
    """All attacks on networks that predict together, each a stage of the run.

    Args:
        noisy: Whether the networks draw noise.
    """
    few = test.subset(torch.arange(min(settings.attacked, len(test))))
    images, labels = few.images, few.labels
    common: dict[str, Any] = {"seed": seed, "progress": log.progress}
    draws = settings.pgd_samples if noisy else 1
    verdicts = settings.judge_samples if noisy else 1
    first = slice(min(settings.autoattack_images, len(few)))
    epsilon = settings.epsilons[-1] / 255

    def fast_sign() -> dict[str, Any]:
        each = max(1, settings.num_samples // len(networks)) if noisy else 1
        made = iterative_fast_sign(
            list(networks),
            images,
            labels,
            other_classes(labels, few.num_classes, seed),
            num_steps=settings.iterations,
            step=settings.step / 255,
            num_samples=each,
            **common,
        )
        judged = judge(list(networks), images, labels, made, num_samples=max(verdicts, each + 1))
        assert made.success_by_step is not None
        return {
            "success": 100 * made.success_by_step,
            "judged_success": 100 * judged.success(made.attack),
            "accuracy": 100 * judged.clean_accuracy,
        }

    def pgd() -> dict[str, Any]:
        made = [
            eot_pgd(
                list(networks),
                images,
                labels,
                epsilon=each / 255,
                num_steps=settings.pgd_steps,
                num_samples=draws,
                **common,
            )
            for each in settings.epsilons
        ]
        named = dict(zip(map(str, settings.epsilons), made, strict=True))
        judged = judge(list(networks), images, labels, named, num_samples=verdicts)
        found = detect(list(networks), images, made[-1], num_samples=max(verdicts, 2))
        return {
            "accuracy": {key: 100 * judged.accuracy(key) for key in named},
            "auroc_entropy": found.entropy,
            "auroc_mutual_information": found.mutual_information,
        }

    def rand() -> dict[str, Any]:
        x, y = images[first], labels[first]
        options = {"epsilon": epsilon, "num_samples": draws} | common
        made = autoattack(
            list(networks), x, y, attacks="rand", num_steps=settings.autoattack_steps, **options
        )
        own = eot_pgd(list(networks), x, y, num_steps=settings.pgd_steps, **options)
        judged = judge(list(networks), x, y, [own, *made], num_samples=verdicts)
        checks = gradient_masking_checks(
            list(networks),
            x,
            y,
            attack=own,
            num_steps=settings.pgd_steps,
            num_queries=settings.queries,
            judge_samples=verdicts,
            **options,
        )
        return {
            "clean": 100 * judged.clean_accuracy,
            "accuracy": {key: 100 * judged.accuracy(key) for key in judged.correct},
            "worst": 100 * judged.robust_accuracy,
            "checks": {check.name: check.verdict for check in checks},
            "suspicious": sum(check.verdict == "suspicious" for check in checks),
        }

    return {
        "fast_sign": log.once(f"{name}, iterative fast sign", fast_sign),
        "eot_pgd": log.once(f"{name}, EoT-PGD", pgd),
        "autoattack": log.once(f"{name}, AutoAttack", rand),
    }


def other_classes(labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """For every image a class that is not its own, by chance, the same for all networks."""
    generator = torch.Generator().manual_seed(seed)
    return (labels + torch.randint(1, num_classes, labels.shape, generator=generator)) % num_classes


def figures(
    metrics: Sequence[Mapping[str, Any]], labels: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Success by step as in Figure 7, and what EoT-PGD leaves."""
    names = list(labels)
    steps = list(range(len(metrics[0][names[0]]["fast_sign"]["success"])))
    by_step = [
        over_seeds(labels[name], steps, [m[name]["fast_sign"]["success"] for m in metrics])
        for name in names
    ]
    epsilons = list(metrics[0][names[0]]["eot_pgd"]["accuracy"])
    left = [
        over_seeds(
            labels[name],
            epsilons,
            [[m[name]["eot_pgd"]["accuracy"][e] for e in epsilons] for m in metrics],
            kind="bar",
        )
        for name in names
    ]
    return [
        figure(
            "Success of the iterative fast sign attack", "step", "images taken for it, %", by_step
        ),
        figure("Accuracy under EoT-PGD", "ε, of 255", "accuracy, %", left),
    ]
