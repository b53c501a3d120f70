"""One call on a small transformer that reads digits row by row, next to plain training.

Rows of pixels are tokens. Either plain training goes on for a fifth of the passes, or
`add_uncertainty` gets this time. Full size takes about five minutes a seed on one core.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.uncertainty import upgrade

if TYPE_CHECKING:
    from zeromean.data import ImageSet
    from zeromean.training import TrainingConfig

TITLE = "One call that adds uncertainty: a small transformer on MNIST, row by row"
SOURCE = "ours: what a user of the library gets from a network that is trained already"
NEEDS: tuple[str, ...] = ("mnist", "fashion-mnist")
COVERS: tuple[str, ...] = ()
TIMINGS = ("*seconds", "cost", "time_share")
FOREIGN = "Fashion-MNIST"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The network, and what is done with it."""

    epochs: int = 60
    """Passes over the training set of the network that is given."""
    control_epochs: int = 12
    """Passes of plain training that are the control."""
    call_epochs: int = 8
    """Passes of the call, which takes the rest of the time to look and choose."""
    width: int = 32
    """Features of a token."""
    num_layers: int = 2
    """Layers of the encoder."""
    lr: float = 3e-3
    """Adam's rate at the first step."""
    more_lr: float = 1e-3
    """The same where a network is trained on."""
    batch_size: int = 100
    """Images in a mini-batch."""
    data: str = "mnist"
    """Data set: mnist, or digits."""
    foreign: str = "fashion-mnist"
    """Foreign images: fashion-mnist, notmnist, or digits."""
    train_size: int = 10_000
    """Training images, the first ones; the last 5,000 of the set are for validation."""
    validation_size: int = 5000
    """Validation images: those of the call."""
    test_size: int = 10_000
    """Test images."""
    num_samples: int = 20
    """Samples in an averaged prediction."""
    seed: int = 0
    """Seed of the initialization, the batches and the noise."""


QUICK = Config(epochs=10, control_epochs=2, call_epochs=1, train_size=4000, test_size=2000)
SMOKE = Config(
    epochs=2,
    control_epochs=1,
    call_epochs=1,
    width=8,
    num_layers=1,
    data="digits",
    foreign="digits",
    train_size=100,
    validation_size=60,
    test_size=60,
    num_samples=4,
)
CLAIMS = upgrade.claims(95.0, FOREIGN)


class RowTransformer(nn.Module):
    """Rows of grey images as tokens: an encoder, and a dense layer on their average."""

    def __init__(self, width: int, num_layers: int, size: int = 28):
        super().__init__()
        self.embedding = nn.Linear(size, width)
        self.position = nn.Parameter(0.02 * torch.randn(size, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embedding(images.squeeze(1)) + self.position
        return self.head(self.norm(self.encoder(tokens)).mean(1))


def run(config: Config, log: RunLog) -> dict[str, Any]:
    train = shared_networks.grey_images(config.data, "rest", config.train_size, log)
    validation = shared_networks.grey_images(config.data, "validation", config.validation_size, log)
    known = {"network": "row transformer", "width": config.width, "layers": config.num_layers}
    known |= {"data": config.data, "train_size": config.train_size}

    def trained(name: str, build: Any, tuning: TrainingConfig) -> Any:
        described = {k: v for k, v in asdict(tuning).items() if k != "seed"}
        identity = known | {"training": described, "after": 0 if name == "base" else config.epochs}
        watch = partial(upgrade.timed_look, validation.subset(torch.arange(50)))
        return shared_networks.train(name, identity, build, train, tuning, log, on_epoch=watch)

    base = trained(
        "base",
        partial(RowTransformer, config.width, config.num_layers),
        _tuning(config, config.epochs, config.lr),
    )
    control = trained(
        "control",
        lambda: copy.deepcopy(base.model),
        _tuning(config, config.control_epochs, config.more_lr),
    )
    compute = partial(_compared, base.model, control.model, train, validation, config, log)
    compared = log.once("call", compute)
    log.metrics(**{key: compared[key] for key in (*upgrade.LABELS, "chosen")})
    first = upgrade.seconds_per_pass(base.history)
    return compared | {
        "time_share": compared["seconds"] / (first * config.epochs),
        "control_time_share": config.control_epochs / config.epochs,
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return upgrade.figures(records, FOREIGN)


def _tuning(config: Config, epochs: int, lr: float) -> TrainingConfig:
    from zeromean.training import TrainingConfig

    return TrainingConfig(
        epochs=epochs, batch_size=config.batch_size, lr=lr, log_alpha_lr=1e-2, seed=config.seed
    )


def _compared(
    base: nn.Module,
    control: nn.Module,
    train: ImageSet,
    validation: ImageSet,
    config: Config,
    log: RunLog,
) -> dict[str, Any]:
    from zeromean.training import add_uncertainty

    call = partial(
        add_uncertainty,
        base,
        train,
        validation,
        config=_tuning(config, config.call_epochs, config.more_lr),
        num_samples=config.num_samples,
        accelerator="cpu",
        folder=log.folder / "call",
        seed=config.seed,
        progress=log.progress,
    )
    test = shared_networks.grey_images(config.data, "test", config.test_size, log)
    foreign = shared_networks.grey_images(config.foreign, "test", config.test_size, log).images
    return upgrade.compared(base, control, call, test, foreign)
