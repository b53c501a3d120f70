"""One call on a network for CIFAR-10, next to plain training for the same time.

A small fast network is trained by SGD over one cycle, with plain cross-entropy. Then either the
same recipe goes on for a fifth of the passes, or `add_uncertainty` gets this time: its passes are
fewer, since it also looks for what to do. BatchNorm's statistics are taken anew for
all of them: the running ones of this network are those of the last few batches, and add an error of
their own. Full size takes about 80 minutes a seed on one core that computes in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import nn

from zeromean.experiments.networks import cifar, shared_networks
from zeromean.experiments.networks.cifar import Network, Settings, Trained
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.uncertainty import upgrade

TITLE = "One call that adds uncertainty: CIFAR-10 next to plain training for the same time"
SOURCE = "ours: what a user of the library gets from a network that is trained already"
NEEDS: tuple[str, ...] = ("cifar10", "cifar100")
COVERS: tuple[str, ...] = ()
TIMINGS = ("*seconds", "cost", "time_share")
FOREIGN = "CIFAR-100"


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """The network, and what is done with it."""

    epochs: int = 25
    """Passes over the training set of the network that is given."""
    architecture: str = "airbench"
    """vgg or airbench."""
    width: float = 0.75
    """Width of the network, in parts of that of its authors."""
    dropout: float = 0.0
    """Factor of the network's drop rates; 0 for none."""
    label_smoothing: float = 0.0
    """Part of every label that goes to all classes alike."""
    more_lr: float = 0.05
    """Rate of SGD at its peak where a network is trained on."""
    control_epochs: int = 5
    """Passes of plain training that are the control."""
    call_epochs: int = 4
    """Passes of the call, which takes the rest of the time to look and choose."""
    look_size: int = 5000
    """Validation images: those of the call."""
    foreign: str = "cifar100"
    """Foreign images: cifar100, or digits in this data set's place."""


QUICK = Config(**{**cifar.QUICK, "epochs": 8, "look_size": 1000})
SMOKE = Config(
    **{**cifar.SMOKE, "architecture": "airbench", "width": 0.1},
    control_epochs=1,
    call_epochs=1,
    foreign="digits",
)
CLAIMS = upgrade.claims(91.0, FOREIGN)


def run(config: Config, log: RunLog) -> dict[str, Any]:
    network = Network(dropout=False)
    base = cifar.train("base", network, config, log, watch=upgrade.timed_look)
    control = cifar.train_any(
        "control",
        {"network": asdict(network), "goes_on_after": config.epochs},
        lambda images, num_classes: copy.deepcopy(base.model),
        config,
        log,
        watch=upgrade.timed_look,
        epochs=config.control_epochs,
        lr=config.more_lr,
    )
    for model in (base.model, control.model):
        upgrade.recalibrate_(model, base.train.images)
    compared = log.once("call", partial(_compared, base, control.model, config, log))
    log.metrics(**{key: compared[key] for key in (*upgrade.LABELS, "chosen")})
    first = upgrade.seconds_per_pass(base.history)
    return compared | {
        "time_share": compared["seconds"] / (first * config.epochs),
        "control_time_share": config.control_epochs / config.epochs,
        "bits": cifar.bits(config),
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return upgrade.figures(records, FOREIGN)


def _compared(base: Trained, control: nn.Module, config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean.data import ShiftAndAlternate
    from zeromean.training import TrainingConfig, add_uncertainty

    tuning = TrainingConfig(
        epochs=config.call_epochs,
        batch_size=config.batch_size,
        optimizer="sgd",
        decay="one-cycle",
        lr=config.more_lr,
        peak_at=config.peak_at,
        weight_decay=config.weight_decay,
        precision=cifar.precision_of(config),
    )
    call = partial(
        add_uncertainty,
        base.model,
        base.train,
        cifar.images(config, "validation", log),
        config=tuning,
        augment=ShiftAndAlternate(config.shift, config.seed + 1),
        num_samples=config.num_samples,
        accelerator="cpu",
        folder=log.folder / "call",
        seed=config.seed,
        progress=log.progress,
    )
    foreign = shared_networks.colour_images(config.foreign, "test", config.test_size, log).images
    return upgrade.compared(base.model, control, call, base.test, foreign)
