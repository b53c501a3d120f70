"""A recurrent network made sparse, then rounded to few bits: digits read row by row."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import zeromean as zm
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import bars, figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import lenet_figures, measures
from zeromean.experiments.sparse_networks.compression import times_faster

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "A sparse LSTM: digits read row by row"
SOURCE = "ours; Molchanov, lecture: extensions"
NEEDS: tuple[str, ...] = ("digits",)
COVERS = ("molchanov: extensions", "molchanov: quantization")
TIMINGS = ("compressed.batch_*",)


@dataclass(frozen=True, kw_only=True)
class Config:
    """An LSTM that is trained, made stochastic, trained on, pruned and rounded."""

    hidden_size: int = 96
    """Units of the LSTM."""
    dense_epochs: int = 60
    """Epochs of the deterministic network."""
    epochs: int = 250
    """Epochs of sparse variational dropout after these."""
    kl_warmup_epochs: int = 60
    """Epochs over which the weight of the KL term rises to 1."""
    log_variance: float = -8.0
    """Log-variance of the weights at the start."""
    batch_size: int = 32
    """Sequences in a mini-batch."""
    lr: float = 3e-3
    """Adam's learning rate, which falls linearly to zero; ten times that for log-variances."""
    seed: int = 0
    """Seed of the initialization, the batches and the noise."""


QUICK = Config(dense_epochs=20, epochs=60, kl_warmup_epochs=15)
SMOKE = Config(hidden_size=16, dense_epochs=2, epochs=3, kl_warmup_epochs=1)
CLAIMS = [
    Claim(
        "accuracy_lost",
        0.0,
        ours("the lecture names recurrent networks, without a number"),
        1.0,
        "at most",
        "accuracy that the sparse network loses",
        "points",
    ),
    Claim("compression", 10.0, ours(), 0.0, "at least", "weights over weights left", "×"),
]


class RowReader(nn.Module):
    """Reads an image `(N, 1, 8, 8)` from top to bottom, and classifies what it remembers."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.lstm = nn.LSTM(8, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, 10)

    def forward(self, images: Tensor) -> Tensor:
        outputs, _ = self.lstm(images.squeeze(1))
        return self.head(outputs[:, -1])


def run(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean import data

    train, test = data.load("digits", "train"), data.load("digits", "test")
    dense = _train("dense", partial(RowReader, config.hidden_size), config, train, test, log)
    sparse = _train("sparse", partial(_stochastic, dense.model, config), config, train, test, log)
    pruned = measures.pruned_copy(sparse.model)
    zm.save(pruned, log.folder / "pruned.safetensors")
    left = zm.sparsity(pruned)
    accuracy = {
        "dense": 100 - measures.error(dense.model, test),
        "sparse": 100 - measures.error(pruned, test),
        "sparse_averaged": 100 - measures.averaged_error(pruned, test),
    }
    return {
        "accuracy": accuracy,
        "accuracy_lost": accuracy["dense"] - accuracy["sparse"],
        "compression": left.total.compression,
        "kept": left.total.kept,
        "sparsity": {layer.name: 100 * layer.sparsity for layer in left.layers},
        "quantized": measures.quantized(pruned, test),
        "compressed": log.once("compressed", lambda: _compressed(pruned, test, log.folder)),
        "by_epoch": {key: [row[key] for row in sparse.history] for key in ("error", "compression")},
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    epochs = list(range(1, len(metrics[0]["by_epoch"]["error"]) + 1))
    labels = {"error": "error of the pruned network, %", "compression": "weights over weights left"}
    return [
        *(
            figure(
                f"Sparse variational dropout: {label}",
                "epoch",
                label,
                [over_seeds("sparse", epochs, [m["by_epoch"][key] for m in metrics])],
                y_log=key == "compression",
            )
            for key, label in labels.items()
        ),
        *lenet_figures.quantization_figures(metrics),
        bars(
            "Test accuracy",
            "network",
            {"accuracy": "accuracy"},
            [{k: {"accuracy": v} for k, v in m["accuracy"].items()} for m in metrics],
        ),
    ]


def _compressed(pruned: nn.Module, test: ImageSet, folder: Path) -> dict[str, float]:
    """What `zm.compress` makes of it: units, bytes, and how many times faster, on one thread."""
    from zeromean import export

    dense = zm.to_deterministic(pruned).eval()
    small = zm.compress(pruned, example_inputs=test.images[:100])
    saved = export.save_compressed(small, folder / "compressed.safetensors", original=dense)
    lstm: Any = small.get_submodule("lstm")
    assert saved.ratio is not None
    return {
        "units": lstm.hidden_size,
        "file_bytes": saved.size,
        "file": saved.ratio,
        **{f"batch_{n}": times_faster(small, dense, test.images[:n], 31) for n in (1, 32, 256)},
    }


def _stochastic(dense: nn.Module, config: Config) -> nn.Module:
    model = copy.deepcopy(dense)
    posterior = partial(zm.Additive, log_variance=config.log_variance)
    zm.make_stochastic_(model, posterior=posterior, prior=zm.LogUniform())
    return model


def _train(
    name: str, build: Any, config: Config, train: ImageSet, test: ImageSet, log: RunLog
) -> Any:
    from zeromean.training import TrainingConfig

    sparse = name == "sparse"
    settings = TrainingConfig(
        epochs=config.epochs if sparse else config.dense_epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        log_alpha_lr=10 * config.lr,
        kl_warmup_epochs=config.kl_warmup_epochs if sparse else 0,
        clip_gradient=1.0,
        seed=config.seed,
    )
    identity = {
        "experiment": "sparse_lstm",
        "name": name,
        "config": asdict(config) | {"seed": None},
    }
    look = partial(_look, test) if sparse else None
    return shared_networks.train(name, identity, build, train, settings, log, on_epoch=look)


def _look(test: ImageSet, epoch: int, model: nn.Module) -> dict[str, float]:
    pruned = measures.pruned_copy(model)
    compression = zm.sparsity(pruned).total.compression
    return {"error": measures.error(pruned, test), "compression": compression}
