"""Which layers of a network on CIFAR are stochastic, and how."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.networks.cifar.settings import Settings
from zeromean.experiments.networks.distributions import POSTERIORS, PRIORS

# What the paper has stochastic, and the same in the small network: convolutions, then dense.
LAST_LAYERS = {
    "vgg": ("conv11", "conv12", "conv13", "dense1"),
    "airbench": ("conv5", "conv6", "dense1"),
}
# The drop rate of the small network; the VGG-like one has the paper's.
DROP_RATE = 0.2
# Images whose patches whiten the first convolution of the small network.
WHITENING_SIZE = 2000


@dataclass(frozen=True, kw_only=True)
class Network:
    """Which of the last layers are stochastic, and how; and whether there is dropout."""

    layers: tuple[str, ...] = ()
    """Names of layers; "last" stands for the paper's, `LAST_LAYERS`."""
    posterior: str = "layer"
    """Key of `POSTERIORS`."""
    prior: str = "log-uniform"
    """Key of `PRIORS`."""
    log_alpha: float = -10.0
    """log α at the start."""
    dropout: bool = True

    def build(self, settings: Settings, images: torch.Tensor, num_classes: int) -> nn.Module:
        from zeromean.models import airbench_like, vgg_like, whiten_

        names = LAST_LAYERS[settings.architecture] if self.layers == ("last",) else self.layers
        make: dict[str, Any] = {
            name: partial(
                zm.Conv2d if name.startswith("conv") else zm.Linear,
                posterior=partial(POSTERIORS[self.posterior], **_start(self)),
                prior=PRIORS[self.prior],
            )
            for name in names
        }
        dropout = self.dropout and settings.dropout > 0
        if settings.architecture == "vgg":
            network = vgg_like(settings.width, num_classes, dropout=dropout, **make)
        else:
            rate = DROP_RATE if dropout else 0.0
            network = airbench_like(settings.width, num_classes, dropout=rate, **make)
            whiten_(network, images[:WHITENING_SIZE])
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p *= settings.dropout
        return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


DETERMINISTIC = Network(dropout=False)
DROPOUT = Network()
VARIANCE = Network(layers=("last",))


def _start(network: Network) -> dict[str, float]:
    return {} if network.posterior == "zero-mean" else {"log_alpha": network.log_alpha}
