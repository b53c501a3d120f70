"""LeNets with sparse variational dropout in every layer, compared with magnitude pruning.

Sparse variational dropout prunes where log α > 3, and does not train afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import Author
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks.lenet_figures import weight_images
from zeromean.experiments.sparse_networks.lenet_training import (
    Settings,
    compare_with_magnitude,
    train_dense,
    train_sparse,
)
from zeromean.experiments.sparse_networks.measures import (
    THRESHOLDS,
    averaged_error,
    error,
    error_and_compression,
    measure,
    pruned_copy,
    quantized,
)


def claims(
    author: Author,
    *,
    error: tuple[float, float],
    compression: float,
    dense_error: float,
    sparsity: Mapping[str, float],
) -> list[Claim]:
    """What the lecture says of a network; the error as reported, and the most that is allowed."""
    reported, allowed = error
    return [
        Claim(
            "sparse.error",
            reported,
            author,
            allowed - reported,
            "at most",
            "sparse variational dropout: test error",
            "%",
        ),
        Claim(
            "sparse.compression",
            compression,
            author,
            0.0,
            "at least",
            "sparse variational dropout: weights over weights that are left",
            "×",
        ),
        Claim(
            "dense.error",
            dense_error,
            author,
            0.2,
            "at most",
            "the network that is not sparse",
            "%",
        ),
        *(
            Claim(
                f"sparse.sparsity.{layer}",
                value,
                author,
                0.0,
                "at least",
                f"weights of {layer} that are gone",
                "%",
            )
            for layer, value in sparsity.items()
        ),
    ]


def run(architecture: Callable[..., nn.Module], config: Settings, log: RunLog) -> dict[str, Any]:
    """Train, prune and measure: sparse variational dropout, then magnitude pruning."""
    train = shared_networks.grey_images(config.data, "rest", config.train_size, log)
    test = shared_networks.grey_images(config.data, "test", config.test_size, log)
    dense = train_dense(architecture, config, train, log)
    sparse = train_sparse(architecture, config, train, log)
    pruned = pruned_copy(sparse.model)
    return {
        "sparse": {
            **measure(pruned, test),
            "error_unpruned": error(sparse.model, test),
            "error_averaged": averaged_error(pruned, test),
        },
        "by_threshold": [
            {"threshold": threshold, **error_and_compression(sparse.model, threshold, test)}
            for threshold in THRESHOLDS
        ],
        "quantized": quantized(pruned, test),
        "by_epoch": {key: [row[key] for row in sparse.history] for key in ("error", "compression")},
        "sparsity_by_epoch": _columns([row["sparsity"] for row in sparse.history]),
        "dense": {"error": error(dense.model, test)},
        "magnitude": compare_with_magnitude(architecture, dense.model, config, train, test, log),
        "pictures": {
            "dense": weight_images(dense.model),
            "sparse": weight_images(pruned),
        },
        "frames": {row["epoch"]: row["frame"] for row in sparse.history if "frame" in row},
    }


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {key: [row[key] for row in rows] for key in rows[0]}
