"""A residual network with BatchNorm, made smaller and faster by one call with its defaults."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import shrunk

TITLE = "A residual network with BatchNorm, shrunk by one call (MNIST)"
SOURCE = "ours; log-normal noise on units: Neklyudov et al. (2017)"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS: tuple[str, ...] = ()
TIMINGS = ("speedup.*",)
NOTES = (
    "The network has a convolution, three residual blocks and a linear layer, with {setting "
    "channels} channels and, behind a stride of two, twice as many. It is trained for {setting "
    "dense_epochs} passes and shrunk by `zeromean.training.shrink` with its defaults: units as few "
    "as they get without a loss that {setting validation_size} validation images could show. Times "
    "are CPU times on one thread, of the network next to the original in turn.",
)


@dataclass(frozen=True, kw_only=True)
class Config(shrunk.Settings):
    """One network and at most eight steps, about an hour and a half of one core."""

    channels: int = 32
    """Channels of the first block; the others have twice as many."""


QUICK = Config(**shrunk.QUICK)
SMOKE = Config(**shrunk.SMOKE, channels=8)
CLAIMS = [
    Claim(
        "speedup.onnxruntime_64",
        3.0,
        ours(),
        0.0,
        "at least",
        "times faster in onnxruntime, batches of 64",
        "×",
    ),
    Claim(
        "speedup.onnxruntime_1",
        3.0,
        ours(),
        0.0,
        "at least",
        "times faster in onnxruntime, one image",
        "×",
    ),
    Claim("file", 20.0, ours(), 0.0, "at least", "file, times smaller", "×"),
    Claim("lost", 0.3, ours(), 0.0, "at most", "test accuracy lost", "points"),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    sets = shrunk.Sets(config, log)
    name = f"residual network of {config.channels} channels"
    dense = shrunk.train_dense(name, lambda: residual_network(config.channels), config, sets, log)
    return shrunk.results(shrunk.shrink(dense, config, sets, log, name="units"), sets.test)


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    seeds = [record["metrics"] for record in records]
    return shrunk.curves("Error of all networks on the way", {"shrunk": seeds})


def residual_network(channels: int) -> nn.Sequential:
    """Three blocks for grey images of 28 × 28 pixels."""
    from zeromean.models.residual import ResidualBlock

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        make: dict[str, Any] = dict.fromkeys(("conv1", "conv2", "shortcut"), nn.Conv2d)
        return ResidualBlock(inputs, outputs, stride=stride, **make)

    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, channels, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(channels),
            activation=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            block1=block(channels, channels, 1),
            block2=block(channels, 2 * channels, 2),
            block3=block(2 * channels, 2 * channels, 1),
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            dense=nn.Linear(2 * channels, 10),
        )
    )
