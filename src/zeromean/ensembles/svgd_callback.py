"""What makes the steps of `fit` those of SVGD; imported with Lightning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from zeromean.ensembles.svgd import stein_gradients_
from zeromean.prediction.ensemble import Ensemble


class SteinCallback(pl.Callback):
    """Turns the gradients of the networks' average loss into steps of SVGD."""

    def __init__(self, members: Ensemble, prior_scale: float, bandwidth: float | None):
        self.members = members
        self.prior_scale = prior_scale
        self.bandwidth = bandwidth

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            raise ValueError(
                f"SVGD moves its particles in one process, got {trainer.world_size}; use devices=1."
            )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        module: Any = pl_module
        for parameter in self.members.parameters():
            if parameter.grad is not None:
                parameter.grad *= len(self.members)  # The loss is their average.
        stein_gradients_(
            list(self.members),
            num_data=module.num_data,
            prior_scale=self.prior_scale,
            bandwidth=self.bandwidth,
        )
