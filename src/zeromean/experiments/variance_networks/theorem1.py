"""Theorem 1: how far a prediction moves when the means are dropped, and what bounds it.

A network on digits is trained while log α of its middle layer is raised at a constant rate. At
every grid value the means are dropped from a copy: the predictions' change is measured, and
compared with the certificates in weight space and in activation space and the paper's bound (38).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog

TITLE = "Theorem 1: the certificate against the measured change when the means are dropped"
SOURCE = "Neklyudov et al. (2019), Theorem 1 and Appendix A"
NEEDS: tuple[str, ...] = ("digits",)
COVERS = ("paper: Theorem 1",)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A small network on digits."""

    log_alpha: tuple[int, int] = (-4, 16)
    """First and last value of log α."""
    steps_per_unit: int = 240
    """Training steps while log α rises by one."""
    num_samples: int = 4000
    """Samples of the noise in each averaged prediction."""
    num_inputs: int = 300
    """Test images for which the change is measured."""
    seed: int = 0
    """Seed of the network and of the noise."""


QUICK = Config(steps_per_unit=120, num_samples=1000, num_inputs=200)
SMOKE = Config(log_alpha=(2, 12), steps_per_unit=10, num_samples=100, num_inputs=50)
CLAIMS = [
    Claim(
        "violations",
        0.0,
        ours("our certificate, which is below the bound of equation (38)"),
        label="predictions that move by more than the certificate allows",
    ),
    Claim(
        "change_at_end",
        0.0,
        PAPER("Theorem 1, equation (13)"),
        0.01,
        label="largest change of a probability at the highest α",
    ),
    Claim(
        "accuracy_lost_at_end",
        0.0,
        PAPER("section 4.3, “without affecting the predictions”"),
        0.5,
        label="accuracy lost by dropping the means at the highest α",
        unit="points",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    rows = _sweep(config, log)
    last = rows[-1]
    return {
        "rows": rows,
        "violations": sum(row["violations"] for row in rows),
        "change_at_end": last["change_max"],
        "accuracy_lost_at_end": last["accuracy"] - last["accuracy_zero_mean"],
        "median_over_change": {
            "weight_space": _median_ratio(rows, "weight_space"),
            "activation_space": _median_ratio(rows, "activation_space_mean"),
        },
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = {
        "paper": "the paper's bound (38)",
        "weight_space": "certificate, weight space",
        "activation_space_mean": "certificate, activation space (mean over inputs)",
        "change_max": "measured, largest",
        "change_mean": "measured, mean over inputs",
    }
    accuracies = {
        "accuracy": "averaged",
        "accuracy_zero_mean": "averaged, means dropped",
        "accuracy_mean_propagation": "mean propagation",
    }
    return [
        figure(
            "Change of a predicted probability when the means are dropped",
            "log α",
            "change of probability",
            _curves(records, names),
            y_log=True,
        ),
        figure("Test accuracy", "log α", "accuracy, %", _curves(records, accuracies)),
    ]


def _curves(records: Sequence[Mapping[str, Any]], names: dict[str, str]) -> list[dict[str, Any]]:
    rows = [record["metrics"]["rows"] for record in records]
    log_alpha = [row["log_alpha"] for row in rows[0]]
    return [
        over_seeds(label, log_alpha, [[row[key] for row in run] for run in rows])
        for key, label in names.items()
    ]


def _sweep(config: Config, log: RunLog) -> list[dict[str, float]]:
    inputs, labels, test_inputs, test_labels = small_networks.digits()
    posterior = partial(zm.Multiplicative, share="layer", log_alpha=config.log_alpha[0])
    model = small_networks.digits_network(
        partial(zm.Linear, posterior=posterior, prior=None, sampler=zm.local)
    )
    log_alpha = model.get_parameter("3.weight.log_alpha").requires_grad_(False)
    first, last = config.log_alpha
    steps = (last - first) * config.steps_per_unit

    def measure(unit: int) -> dict[str, float]:
        # Whether a row is measured or read again, the training goes on with the same noise.
        with torch.random.fork_rng(devices=[]):
            return log.once(
                f"log_alpha {unit}", lambda: _measure(model, test_inputs, test_labels, config)
            )

    def raise_alpha(step: int) -> None:
        log_alpha.fill_(first + step / config.steps_per_unit)
        if step and step % config.steps_per_unit == 0:
            measure(first + step // config.steps_per_unit)

    small_networks.train(
        model,
        inputs,
        labels,
        steps=steps,
        batch_size=100,
        lr=1e-3,
        before_step=raise_alpha,
        checkpoint=log.folder / "sweep.pt",
        every=config.steps_per_unit,
    )
    raise_alpha(steps)
    rows = [measure(unit) for unit in range(first + 1, last + 1)]
    for row in rows:
        log.metrics(**row)
    return rows


@torch.no_grad()
def _measure(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, config: Config
) -> dict[str, float]:
    inputs, labels = inputs[: config.num_inputs], labels[: config.num_inputs]
    log_alpha = model.get_parameter("3.weight.log_alpha").item()
    dropped = copy.deepcopy(model)
    certificate = zm.zero_mean_(dropped, where=lambda name, layer: True, inputs=inputs)
    layer = certificate.layers["3"]
    assert layer.weight_space is not None
    assert layer.activation_space is not None
    # The same noise before and after: what remains is the effect of the means.
    draw = partial(zm.sample_outputs, inputs=inputs, num_samples=config.num_samples, seed=0)
    before, after = draw(model).softmax(-1), draw(dropped).softmax(-1)
    difference = before - after
    change = difference.mean(0).abs()
    noise = difference.std(0) / math.sqrt(config.num_samples)
    mean_propagation = zm.predict_proba(model, inputs, 1, sampler=zm.mean)
    bound = certificate.per_input.unsqueeze(1)
    num_weights = small_networks.HIDDEN**2
    return {
        "log_alpha": log_alpha,
        "paper": min(1.0, math.sqrt(num_weights / (2 * math.pi)) * math.exp(-log_alpha / 2)),
        "weight_space": layer.weight_space,
        "activation_space_mean": layer.activation_space.mean().item(),
        "activation_space_max": layer.activation_space.max().item(),
        "change_max": change.max().item(),
        "change_mean": change.amax(1).mean().item(),
        "noise": noise.max().item(),
        # The bound is on averages over all noise: averages over samples may lie above it.
        "violations": int((change - 5 * noise > bound).sum()),
        "accuracy": small_networks.accuracy(before.mean(0), labels),
        "accuracy_zero_mean": small_networks.accuracy(after.mean(0), labels),
        "accuracy_mean_propagation": small_networks.accuracy(mean_propagation, labels),
    }


def _median_ratio(rows: list[dict[str, float]], key: str) -> float:
    """How far a bound is above the measured change, the vacuous ones left out."""
    ratios = sorted(row[key] / row["change_mean"] for row in rows if row[key] < 0.99)
    return ratios[len(ratios) // 2] if ratios else math.nan
