"""Structured sparsity: log-normal noise on the units of LeNet-5-Caffe takes whole ones away."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

import zeromean as zm
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, over_seeds, trace
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import lenet_training, measures

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Structured sparsity: fewer filters and neurons by log-normal noise, LeNet-5-Caffe"
SOURCE = "talk on variational dropout, outlook; Neklyudov et al. (2017)"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = (
    "talk: log-normal noise on neurons",
    "chirkova: other compression",
    "molchanov: extensions",
)
VERSION = 2  # Trained on 55,000 images, the others being the validation set.
# The noise stands behind the last module that a layer has to itself.
UNITS = {"conv1": ("pool1", 20), "conv2": ("pool2", 50), "dense1": ("activation3", 500)}


@dataclass(frozen=True, kw_only=True)
class Config(lenet_training.Settings):
    """Trained without noise, then with log-normal noise behind every hidden layer."""

    epochs: int = 40
    """Epochs with noise."""
    lr: float = 1e-3
    """Adam's learning rate for the weights, which falls linearly to zero."""
    noise_lr: float = 1e-2
    """Adam's learning rate for the noise."""
    kl_weights: tuple[float, float, float] = (30.0, 15.0, 3.0)
    """Weights of the KL terms of conv1, conv2 and dense1. With 1, as in the ELBO, a filter costs no
    more than a neuron, and all filters stay."""
    dense_epochs: int = 15
    """Epochs without noise, before."""


# Units of each layer that are left, and the test error in per cent.
PUBLISHED = {"conv1": 3, "conv2": 18, "dense1": 283}
PUBLISHED_ERROR = 0.86
QUOTED = {"Neklyudov et al. (2017)": (PUBLISHED_ERROR,)}
NOTES = (
    "The KL terms of conv1, conv2 and dense1 are multiplied by {setting kl_weights}: this is "
    "not the ELBO, in which a filter costs no more than a neuron, and all filters stay. The "
    "weights were chosen by what is left of the layers.",
    "Left here are {kept.conv1} and {kept.conv2} filters and {kept.dense1} neurons, with an error "
    f"of {{error}}%. Neklyudov et al. (2017), Table 1, report {PUBLISHED['conv1']} and "
    f"{PUBLISHED['conv2']} filters and {PUBLISHED['dense1']} neurons of the same network, with "
    f"{PUBLISHED_ERROR}%.",
)
QUICK = Config(**lenet_training.QUICK)
SMOKE = Config(**lenet_training.SMOKE)
CLAIMS = [
    Claim("error", 1.0, ours(), 0.0, "at most", "test error without the dropped units", "%"),
    *(
        Claim(
            f"kept.{layer}",
            count / 2,
            ours("half of them"),
            0.0,
            "at most",
            f"units of {layer} that are left, of {count}",
        )
        for layer, (_, count) in UNITS.items()
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean.models.lenet import lenet5_caffe

    train = shared_networks.grey_images(config.data, "rest", config.train_size, log)
    test = shared_networks.grey_images(config.data, "test", config.test_size, log)
    dense = lenet_training.train_dense(lenet5_caffe, config, train, log).model
    noisy = _train_noise(dense, config, train, log)
    pruned = measures.pruned_copy(noisy.model)
    return {
        "error": measures.error(pruned, test),
        "error_dense": measures.error(dense, test),
        "error_averaged": measures.averaged_error(pruned, test),
        "kept": _kept(pruned),
        "by_epoch": {
            "error": [row["error"] for row in noisy.history],
            **{layer: [row[f"kept/{layer}"] for row in noisy.history] for layer in UNITS},
        },
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    curves = [record["metrics"]["by_epoch"] for record in records]
    epochs = list(range(1, len(curves[0]["error"]) + 1))
    units = [
        over_seeds(
            f"{layer}, of {count}", epochs, [[100 * n / count for n in c[layer]] for c in curves]
        )
        for layer, (_, count) in UNITS.items()
    ]
    errors = [over_seeds("pruned", epochs, [c["error"] for c in curves])]
    ours_at_end = [
        [100 * record["metrics"]["kept"][layer] / count for layer, (_, count) in UNITS.items()]
        for record in records
    ]
    published = [100 * PUBLISHED[layer] / count for layer, (_, count) in UNITS.items()]
    at_end = [
        over_seeds("ours", list(UNITS), ours_at_end, kind="bar"),
        trace("Neklyudov et al. (2017)", list(UNITS), published, kind="bar"),
    ]
    return [
        figure("Units that are left", "epoch", "units, %", units),
        figure("Units that are left in the end", "layer", "units, %", at_end),
        figure(
            "Error of the pruned network on 2,000 validation images",
            "epoch",
            "error, %",
            errors,
        ),
    ]


def add_noise(
    network: nn.Sequential, kl_weights: Sequence[float] = (1.0, 1.0, 1.0)
) -> nn.Sequential:
    """A copy with log-normal noise behind every hidden layer, `noise_conv1` and so on."""
    places = {
        after: (f"noise_{name}", count, weight)
        for (name, (after, count)), weight in zip(UNITS.items(), kl_weights, strict=True)
    }
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, module in network.named_children():
        parts[name] = copy.deepcopy(module)
        if name in places:
            noise, count, weight = places[name]
            parts[noise] = zm.LogNormalDropout(count, kl_weight=weight)
    return nn.Sequential(parts)


def _train_noise(dense: nn.Module, config: Config, train: ImageSet, log: RunLog) -> Any:
    from zeromean.training import TrainingConfig

    validation = shared_networks.grey_images(
        config.data, "validation", lenet_training.LOOK_SIZE, log
    )
    assert isinstance(dense, nn.Sequential)
    settings = TrainingConfig(
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        log_alpha_lr=config.noise_lr,
        kl_warmup_epochs=config.kl_warmup_epochs,
        seed=config.seed,
    )
    identity = {
        "experiment": "structured_lenet5",
        "dense_epochs": config.dense_epochs,
        "kl_weights": config.kl_weights,
        "training": {key: value for key, value in settings.described().items() if key != "seed"},
        "data": [config.data, config.train_size],
    }
    look = partial(_look, validation)
    build = partial(add_noise, dense, config.kl_weights)
    return shared_networks.train(
        "log-normal noise", identity, build, train, settings, log, on_epoch=look
    )


def _look(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, float]:
    pruned = measures.pruned_copy(model)
    kept = {f"kept/{layer}": count for layer, count in _kept(pruned).items()}
    return {"error": measures.error(pruned, few), **kept}


def _kept(pruned: nn.Module) -> dict[str, int]:
    return {layer: int(pruned.get_buffer(f"noise_{layer}.keep").sum()) for layer in UNITS}
