"""The steps of shrinking a network: noise on units, training what is left, sparse weights."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromean.compression.add_unit_noise import add_unit_noise_
from zeromean.compression.compress import trimmed_with_plan
from zeromean.compression.plan import Plan
from zeromean.compression.prune import EmptiedWarning, prune_
from zeromean.conversion.batchnorm import batchnorms, recalibrate_batchnorm_
from zeromean.conversion.make_stochastic import make_stochastic_
from zeromean.distributions.posteriors.additive import Additive
from zeromean.layers.blocks import sampling
from zeromean.layers.dropout.input_noise import input_noises
from zeromean.prediction.inputs import Inputs
from zeromean.samplers.weights import mean
from zeromean.training.collapse import CollapseWarning
from zeromean.training.config import TrainingConfig
from zeromean.training.data_sources import data_source, evaluation_batches
from zeromean.training.likelihoods import Likelihood
from zeromean.training.mini_batches import split_batch
from zeromean.training.objective import kl_divergence
from zeromean.training.trainer import fit

# How far Adam must be able to carry the logarithms of the noise in one step.
_WAY_OF_NOISE = 25.0
_NOISE_LR = (0.01, 0.3)
# How many times longer a network is trained without noise than with it. It is smaller then, and a
# pass takes less time.
TUNING = 2
# Filters come in multiples of it.
FILTERS = 4
# Batches from which BatchNorm's statistics are estimated again.
_CALIBRATION_BATCHES = 50


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every step needs."""

    train: Any
    validation: Any
    likelihood: Likelihood | None
    config: TrainingConfig
    folder: Path
    example: Inputs
    augment: Any
    progress: bool

    def train_(self, model: nn.Module, config: TrainingConfig, name: str) -> None:
        """Train in place, in a folder of its own, or load what was trained there."""
        fit(
            model,
            self.train,
            config,
            folder=self.folder / name,
            validation=None if config.monitor is None else self.validation,
            # A copy: each network has likelihood parameters of its own.
            likelihood=copy.deepcopy(self.likelihood),
            augment=self.augment,
            progress=self.progress,
        )

    def noise_lr(self) -> float:
        """A rate with which units can drown in the epochs that there are."""
        source = data_source(self.train, self.config, augment=self.augment)
        steps = self.config.epochs * len(source.batches) / self.config.accumulate
        low, high = _NOISE_LR
        return min(max(_WAY_OF_NOISE * 2 / steps, low), high)

    def num_data(self) -> int:
        return data_source(self.train, self.config, augment=self.augment).num_data


def price_of(work: Work, model: nn.Module) -> float:
    """Nats that the units of a network cost when their noise is new."""
    noisy = copy.deepcopy(model)
    add_unit_noise_(noisy, work.example)
    with torch.no_grad():
        return float(kl_divergence(noisy))


def drown_units(work: Work, model: nn.Module, beta: float, name: str) -> tuple[nn.Module, Plan]:
    """A network without the units that it can do without, to be trained on."""
    noisy = copy.deepcopy(model)
    add_unit_noise_(noisy, work.example)
    config = replace(
        _without_monitor(work.config),
        beta=beta,
        kl_warmup_epochs=max(1, work.config.epochs // 3),
        log_alpha_lr=work.config.log_alpha_lr or work.noise_lr(),
    )
    with warnings.catch_warnings():
        # Where the price is too high, that is measured, and taken back. What is emptied may also be
        # a block of which only its shortcut is left.
        warnings.simplefilter("ignore", CollapseWarning)
        warnings.simplefilter("ignore", EmptiedWarning)
        work.train_(noisy, config, name)
        prune_(noisy)
    round_filters_(noisy)
    return trimmed_with_plan(noisy, work.example)


@torch.no_grad()
def round_filters_(model: nn.Module) -> None:
    """Keep filters by fours: the nearest number, of those with the clearest signal.

    onnxruntime has fast convolutions only for such numbers: one that reads 25 channels takes 1.6
    times as long as one that reads 28 or 32. torch makes no difference.
    """
    for found in input_noises(model).values():
        noise = found.noise
        kept = int(noise.keep.sum())
        if found.last or kept in (0, noise.num_features):
            continue
        wanted = min(max(round(kept / FILTERS), 1) * FILTERS, noise.num_features)
        clearest = noise.log_snr().masked_fill(noise.log_snr().isnan(), -math.inf)
        noise.keep.fill_(False)
        noise.keep[clearest.topk(wanted).indices] = True


def tune_(work: Work, model: nn.Module, name: str) -> None:
    """Train what is left."""
    epochs = TUNING * work.config.epochs
    work.train_(model, replace(work.config, epochs=epochs, kl_warmup_epochs=0), name)
    recalibrate_(work, model)


def with_sparse_weights(work: Work, model: nn.Module, name: str) -> nn.Module:
    """A copy whose weights are sparse, by sparse variational dropout."""
    sparse = copy.deepcopy(model)
    if isinstance(sparse, nn.Linear):
        sparse = nn.Sequential(sparse)
    make_stochastic_(sparse, posterior=partial(Additive, log_alpha=-8.0))
    epochs = work.config.epochs
    config = replace(
        _without_monitor(work.config),
        beta=1.0,
        kl_warmup_epochs=max(1, epochs // 3),
        log_alpha_lr=work.config.log_alpha_lr or work.noise_lr(),
        prune_after_epochs=max(1, epochs // 2) if epochs > 1 else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapseWarning)
        warnings.simplefilter("ignore", EmptiedWarning)
        work.train_(sparse, config, name)
        prune_(sparse)
    with sampling(sparse, mean):
        recalibrate_(work, sparse)
    return sparse


def recalibrate_(work: Work, model: nn.Module) -> None:
    """Give BatchNorm the statistics of the network as it is now."""
    if batchnorms(model):
        batches = (split_batch(batch)[0] for batch in evaluation_batches(work.train))
        recalibrate_batchnorm_(model, islice(batches, _CALIBRATION_BATCHES))


def _without_monitor(config: TrainingConfig) -> TrainingConfig:
    """To the last epoch: early ones have the best predictions, and all units."""
    return replace(config, monitor=None, patience=None, monitor_mode=None)
