"""Sparse variational dropout in VGG-like networks of several widths (lecture)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.networks import cifar
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import MOLCHANOV, ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import convolutional, measures
from zeromean.experiments.sparse_networks.compression import times_faster

TITLE = "Sparse VGG (CIFAR-10): sparsity, accuracy and speed by the width of the network"
SOURCE = "Molchanov et al. (2017), section 5.4; lectures on Bayesian networks"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS = ("molchanov: VGG-like on CIFAR-10",)
TIMINGS = ("*.times_faster", "*.times_faster_by_one")
NOTES = (
    "All weights of all widths have sparse variational dropout, from networks that were trained "
    "without noise in {setting dense_epochs} passes, in {setting epochs} passes, computed in "
    "{bits} bits. The lecture's training, of several hundred passes by Adam, is not ours. Errors "
    "are of mean propagation, after pruning, with the BatchNorm statistics of the means. Speed is "
    "that of the network that `compress` makes, next to the dense one of the same width, on one "
    "thread, in batches of {setting batch} and one by one.",
)


@dataclass(frozen=True, kw_only=True)
class Config(convolutional.Settings):
    """Networks of three widths.

    1, 2.3 and 8 minutes of one core a pass in float32, with noise 1.3, 4 and 13; 8 hours in
    all.
    """

    widths: tuple[float, ...] = (0.125, 0.25, 0.5)
    """Widths, in parts of the original."""
    batch: int = 64
    """Images in a batch whose prediction is timed."""
    repeats: int = 15
    """Pairs of predictions that are timed."""


QUICK = Config(**convolutional.QUICK, widths=(0.1, 0.2))
SMOKE = Config(**convolutional.SMOKE, widths=(0.05, 0.1), batch=8, repeats=3)
CLAIMS = [
    Claim(
        "sparsity_rises",
        1.0,
        MOLCHANOV("VGG-like on CIFAR-10"),
        label="the wider the network, the larger the share of weights that are gone",
    ),
    *(
        Claim(
            f"{width:g}.{metric}",
            bound,
            ours("the bound that we set before the training"),
            0.0,
            direction,
            f"width {width:g}: {label}",
            unit,
        )
        for width in Config().widths
        for metric, bound, direction, label, unit in (
            ("accuracy_lost", 1.0, "at most", "accuracy lost by sparsity", "points"),
            ("compression", 5.0, "at least", "weights over weights that are left", "×"),
        )
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    if list(config.widths) != sorted(set(config.widths)):
        raise ValueError(f"widths must rise, got {config.widths}.")
    results: dict[str, Any] = {"bits": cifar.bits(config)}
    for width in config.widths:
        name, settings = f"{width:g}", replace(config, width=width)
        build = partial(_vgg, width)
        dense = convolutional.train_dense(name, {"vgg": width}, build, settings, log)
        sparse = convolutional.train_sparse(name, {"vgg": width}, build, settings, log)
        results[name] = log.once(f"measure {name}", partial(_measure, dense, sparse, config))
        results[name]["by_epoch"] = {
            key: [row[key] for row in sparse.history] for key in ("accuracy_mean", "sparsity")
        }
    shares = [results[f"{width:g}"]["sparsity_of_all"] for width in config.widths]
    results["sparsity_rises"] = float(shares == sorted(shares))
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    names = [name for name, value in metrics[0].items() if isinstance(value, dict)]
    widths = [float(name) for name in names]
    drawn = [
        figure(
            title,
            "width, in parts of the original",
            unit,
            [
                over_seeds(label, widths, [[m[name][key] for name in names] for m in metrics])
                for key, label in traces.items()
            ],
            x_log=True,
        )
        for title, unit, traces in (
            ("Error by width", "test error, %", {"error": "sparse", "dense_error": "dense"}),
            ("Sparsity by width", "weights that are gone, %", {"sparsity_of_all": "sparse"}),
            (
                "Compression and speed by width",
                "times",
                {
                    "compression": "fewer weights",
                    "times_faster": "faster, in batches",
                    "times_faster_by_one": "faster, one by one",
                },
            ),
        )
    ]
    layers = metrics[0][names[-1]]["sparsity"]
    by_layer = [
        over_seeds(
            f"width {name}",
            list(layers),
            [[m[name]["sparsity"][layer] for layer in layers] for m in metrics],
        )
        for name in names
    ]
    return [*drawn, figure("Sparsity by layer", "layer", "weights that are gone, %", by_layer)]


def _vgg(width: float, num_classes: int, conv: Any = nn.Conv2d, linear: Any = nn.Linear) -> Any:
    from zeromean.models import vgg_like

    return vgg_like(width, num_classes, conv=conv, dense1=linear, dense2=linear, dropout=False)


def _measure(dense: cifar.Trained, sparse: cifar.Trained, config: Config) -> dict[str, Any]:
    test = dense.test
    pruned = convolutional.pruned(sparse)
    row = convolutional.measure(pruned, test)
    row["dense_error"] = measures.error(dense.model.eval(), test)
    row["accuracy_lost"] = row["error"] - row["dense_error"]
    plain = zm.to_deterministic(pruned).eval()
    compressed = zm.compress(pruned, example_inputs=test.images[: config.batch])
    row["compressed_error"] = measures.error(compressed, test)
    for key, batch in (("times_faster", config.batch), ("times_faster_by_one", 1)):
        images = test.images[:batch].contiguous(memory_format=torch.channels_last)
        row[key] = times_faster(compressed, plain, images, config.repeats)
    return row
