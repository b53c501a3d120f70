"""A residual network made sparse in two ways: sparse variational dropout, magnitude pruning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from zeromean.experiments.networks import cifar
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, trace
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import convolutional, measures
from zeromean.experiments.sparse_networks.magnitude import prune_by_magnitude

TITLE = "Sparse ResNet (CIFAR-10): sparse variational dropout against magnitude pruning"
SOURCE = "the lecture's figure of ResNet-50 on ImageNet (Gale et al., 2019), in small"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS: tuple[str, ...] = ()
NOTES = (
    "A residual network of {setting depth} layers at width {setting width}. Both methods start "
    "from the same network of {setting dense_epochs} passes without noise, and each point has "
    "{setting epochs} passes more: of sparse variational dropout, with the KL term multiplied by "
    "{setting betas}, or of training after pruning by magnitude, once, to the same share of "
    "weights. So a point of either method has the same number of passes; those of sparse "
    "variational dropout take about twice the time. Only without a factor (1) is it the evidence "
    "lower bound. Errors are of mean propagation, with the BatchNorm statistics of the means. "
    "Computed in {bits} bits.",
)


@dataclass(frozen=True, kw_only=True)
class Config(convolutional.Settings):
    """One network, and two for each of four sparsities.

    2.2 minutes of one core a pass in float32, and 4.2 with noise; 6 hours in all.
    """

    depth: int = 20
    """Layers with weights, 6n + 2."""
    width: float = 0.5
    """Width of the network, in parts of the paper's."""
    betas: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    """Factors of the KL term, which decide how sparse the network becomes."""
    epochs: int = 12
    """Passes of each point, after those of the network that all start from."""
    kl_warmup_epochs: int = 5
    """Passes over which the weight of the KL term rises."""


QUICK = Config(**convolutional.QUICK, depth=8, width=0.5, betas=(0.3, 3.0))
SMOKE = replace(Config(**convolutional.SMOKE), width=0.25, depth=8, betas=(1.0, 3.0))
CLAIMS = [
    Claim(
        "gain_over_magnitude",
        0.0,
        ours("the lecture shows the two curves near each other, without numbers"),
        1.0,
        "equal",
        "accuracy above magnitude pruning, in the mean over the sparsities",
        "points",
    ),
    Claim(
        "sparsity_range",
        10.0,
        ours("curves need sparsities that differ"),
        0.0,
        "at least",
        "range of the sparsities",
        "points",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    build = partial(_resnet, config.depth, config.width)
    identity = {"resnet": [config.depth, config.width]}
    dense = convolutional.train_dense("resnet", identity, build, config, log)
    results: dict[str, Any] = {
        "bits": cifar.bits(config),
        "dense_error": log.once("measure dense", lambda: measures.error(dense.model, dense.test)),
    }
    rows = []
    for beta in config.betas:
        name = f"beta {beta:g}"
        sparse = convolutional.train_sparse(
            f"resnet, {name}", identity, build, config, log, beta=beta
        )
        row = log.once(
            f"measure {name}",
            lambda sparse=sparse: convolutional.measure(convolutional.pruned(sparse), sparse.test),
        )
        magnitude = _by_magnitude(dense, row["compression"], identity, config, log)
        rows.append({"beta": beta, "sparse": row, "magnitude": magnitude})
    results["rows"] = rows
    gains = [row["magnitude"]["error"] - row["sparse"]["error"] for row in rows]
    shares = [row["sparse"]["sparsity_of_all"] for row in rows]
    results["gain_over_magnitude"] = sum(gains) / len(gains)
    results["sparsity_range"] = max(shares) - min(shares)
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    words = {"sparse": "sparse variational dropout", "magnitude": "magnitude pruning"}
    rows = [row for record in records for row in record["metrics"]["rows"]]
    rows.sort(key=lambda row: row["sparse"]["sparsity_of_all"])
    points = [
        trace(
            label,
            [row[kind]["sparsity_of_all"] for row in rows],
            [100 - row[kind]["error"] for row in rows],
            kind="scatter",
        )
        for kind, label in words.items()
    ]
    dense = [100 - record["metrics"]["dense_error"] for record in records]
    whole = trace("dense", [0.0] * len(dense), dense, kind="scatter")
    title, x_label = "Accuracy by sparsity, all seeds", "weights that are gone, %"
    return [figure(title, x_label, "test accuracy, %", [*points, whole])]


def _resnet(
    depth: int, width: float, num_classes: int, conv: Any = nn.Conv2d, linear: Any = nn.Linear
) -> nn.Module:
    from zeromean.models import resnet

    return resnet(depth, width, num_classes, conv=conv, dense=linear)


def _by_magnitude(
    dense: cifar.Trained,
    compression: float,
    identity: dict[str, Any],
    config: Config,
    log: RunLog,
) -> dict[str, float]:
    """Pruned once to so many weights, and trained for as many passes as the sparse network."""

    def retrain(model: nn.Module, steps: list[float]) -> nn.Module:
        return cifar.train_any(
            f"magnitude {steps[-1]:.3g}",
            {"network": ["magnitude", identity, steps], "dense_epochs": config.dense_epochs},
            lambda images, num_classes: model,
            config,
            log,
        ).model

    ((reached, model),) = prune_by_magnitude(dense.model, [compression], retrain)
    error = log.once(
        f"measure magnitude {compression:.6g}", lambda: measures.error(model, dense.test)
    )
    return {
        "error": error,
        "compression": reached,
        "sparsity_of_all": 100 * (1 - 1 / reached),
    }
