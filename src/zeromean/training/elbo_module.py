"""The evidence lower bound as a Lightning module."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.arguments import (
    require_flag,
    require_function,
    require_integer,
    require_model,
    shown,
)
from zeromean.compression.prune import EmptiedWarning, prune_, require_prunable
from zeromean.moments import RandomTensor, propagated
from zeromean.prediction.probabilities import require_logits
from zeromean.training.collapse import CollapseWatch
from zeromean.training.config import TrainingConfig
from zeromean.training.devices import generator_state, set_generator_state
from zeromean.training.expectation import expected_nll
from zeromean.training.job import OnBatch
from zeromean.training.layer_monitor import why_not_finite
from zeromean.training.likelihoods import Likelihood, as_likelihood, require_classes_of
from zeromean.training.mini_batches import outputs_of, split_batch
from zeromean.training.objective import clip_log_alpha_, elbo_loss, kl_by_layer, kl_divergence
from zeromean.training.optimizers import NesterovAndAdam
from zeromean.training.parameter_groups import parameter_groups, require_optimized
from zeromean.training.precision import autocast, in_full
from zeromean.training.randomness import derived_seed
from zeromean.training.ranks import seed_rank
from zeromean.training.sharding import changed_whole, is_sharded, whole
from zeromean.training.sync_batchnorm import SyncedBatchNorm
from zeromean.training.weight_average import WeightAverage

# Outputs that autocast has left in one of these are taken back to float32.
_SHORT = (torch.bfloat16, torch.float16)


class ElboModule(pl.LightningModule):
    """Minimises nll + beta · KL / num_data with Adam or SGD; usable with any Lightning Trainer.

    `averages` holds the loss and the data term of the epoch so far, `weight_average` the weights'
    moving average where the configuration asks for one. What `fit` records besides is the work of
    its callback.

    A batch is `(inputs, targets)`, or a mapping of the model's arguments with the targets under
    `labels` or `targets` in it.

    Args:
        model: Maps inputs to logits, or to what the likelihood asks for.
        num_data: Examples in the whole training set.
        steps_per_epoch: Mini-batches in an epoch. Where gradients are accumulated, rates and the
            warm-up count steps of the optimizer, of which there are fewer.
        likelihood: The data term: an object with a method `nll(outputs, targets)`, whose parameters
            are trained too, or a function of both. Default: cross-entropy.
        sync_batchnorm: BatchNorm's statistics are those of all processes, of which there must be
            several.
        on_batch: Called as `on_batch(inputs, targets)` with every batch of the training; gives the
            inputs and targets to train on.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        *,
        num_data: int,
        steps_per_epoch: int,
        likelihood: Likelihood | Callable[[Tensor, Tensor], Tensor] | None = None,
        sync_batchnorm: bool = False,
        on_batch: OnBatch | None = None,
    ):
        super().__init__()
        require_model(model)
        if not isinstance(config, TrainingConfig):
            raise TypeError(f"config must be a TrainingConfig, got {shown(config)}.")
        num_data = require_integer("num_data", num_data, at_least=1)
        steps_per_epoch = require_integer("steps_per_epoch", steps_per_epoch, at_least=1)
        self.model = model
        self.config = config
        self.num_data = num_data
        self.steps_per_epoch = steps_per_epoch
        self.likelihood = as_likelihood(likelihood)
        self.sync_batchnorm = require_flag("sync_batchnorm", sync_batchnorm)
        if on_batch is not None:
            require_function("on_batch", on_batch, "lambda inputs, targets: (inputs, targets)")
        self.on_batch = on_batch
        self.averages = EpochAverages()
        self.collapse = CollapseWatch()
        if config.prune_after_epochs is not None:
            require_prunable(model)
        self.weight_average: WeightAverage | None = None
        if config.average_epochs is not None:
            num_steps = config.average_epochs * self.optimizer_steps
            self.weight_average = WeightAverage(model, num_steps)

    @property
    def likelihood_state(self) -> nn.Module | None:
        """The likelihood where it has something to remember."""
        has_state = isinstance(self.likelihood, nn.Module) and self.likelihood.state_dict()
        return self.likelihood if has_state else None  # pyright: ignore

    @property
    def accumulate(self) -> int:
        """Mini-batches for a step of the optimizer: those of the Trainer, where there is one."""
        trainer = self._trainer
        return getattr(trainer, "accumulate_grad_batches", self.config.accumulate)

    @property
    def optimizer_steps(self) -> int:
        """Steps of the optimizer in an epoch."""
        return math.ceil(self.steps_per_epoch / self.accumulate)

    def forward(self, inputs: Any) -> Tensor:
        return outputs_of(self.model, inputs)

    def configure_optimizers(self) -> Any:
        config = self.config
        beta2 = config.log_alpha_beta2
        groups = parameter_groups(
            self,
            lr=config.lr,
            log_alpha_lr=config.log_alpha_lr,
            log_alpha_betas=None if beta2 is None else (0.9, beta2),
            weight_decay=config.weight_decay,
            scale_lr=config.scale_lr,
            scale_decay=config.scale_decay,
        )
        eps = 1e-8 / self.num_data if config.adam_eps is None else config.adam_eps
        # Fused steps take the scale of float16's gradients off by themselves, too late to clip;
        # and torch has none of SGD for shards.
        fused = config.precision != "float16" and not is_sharded(self)
        if config.optimizer == "sgd":
            _require_rate_of_log_alpha(groups, config)
            optimizer = NesterovAndAdam(groups, momentum=config.momentum, eps=eps, fused=fused)
        else:
            optimizer = torch.optim.Adam(groups, eps=eps, fused=fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: config.lr_factor(step, self.optimizer_steps)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_start(self) -> None:
        if self.config.accumulate not in (1, self.accumulate):
            raise ValueError(
                f"The configuration accumulates {self.config.accumulate} batches and the Trainer "
                f"{self.accumulate}; give the Trainer accumulate_grad_batches="
                f"{self.config.accumulate}."
            )
        world = self.trainer.world_size
        if world > 1:
            # Lightning seeds all ranks alike; the noise of each must be its own.
            seed_rank(self.trainer.global_rank, derived_seed(self.config.seed, world))
        require_optimized(self, *self.trainer.optimizers)

    def on_train_epoch_end(self) -> None:
        with whole(self), torch.no_grad():
            if self.trainer.is_global_zero:
                self.collapse.end_epoch(kl_by_layer(self.model))

    def on_train_epoch_start(self) -> None:
        self.averages = EpochAverages()
        first = self.config.prune_after_epochs
        if first is not None and self.current_epoch >= first:
            with warnings.catch_warnings(), whole(self):
                # A layer may lose everything. The metrics show it, and some are meant to.
                warnings.simplefilter("ignore", EmptiedWarning)
                prune_(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = split_batch(batch)
        targets = labels
        if self.on_batch is not None:
            inputs, targets = split_batch(self.on_batch(inputs, labels))
        precision, device = self.config.precision, targets.device
        step = self.current_epoch * self.optimizer_steps + batch_idx // self.accumulate
        beta = self.config.kl_weight(step, self.optimizer_steps)
        noise = generator_state(device)

        def loss_and_nll() -> tuple[Tensor, Tensor]:
            synced = SyncedBatchNorm() if self.sync_batchnorm else nullcontext()
            with autocast(precision, device.type), synced:
                outputs = self._outputs(inputs)
            if outputs.dtype in _SHORT:
                outputs = outputs.float()
            with in_full(precision, device.type):
                if self.likelihood is None and batch_idx == 0:
                    random = isinstance(outputs, RandomTensor)
                    values = outputs.moments()[0] if random else outputs
                    require_logits(self.model, values)
                    require_classes_of(values, targets)
                data_loss, nll = self._data_loss_and_nll(outputs, targets)
                kl = kl_divergence(self.model)
                return elbo_loss(data_loss, kl, num_data=self.num_data, beta=beta), nll

        loss, nll = loss_and_nll()
        value = loss.item()
        if not math.isfinite(value):
            set_generator_state(device, noise)
            reason = why_not_finite(self.model, inputs, loss_and_nll)
            raise ValueError(
                f"The loss became {value} in epoch {self.current_epoch + 1} at step "
                f"{batch_idx + 1}: {reason}."
            )
        self.averages.add(nll.item(), value, len(labels), beta)
        self.collapse.add(labels, nll.item())
        if self.accumulate == 1:
            return loss
        # Lightning divides by their number also where the last step has fewer batches.
        begun = batch_idx // self.accumulate * self.accumulate
        return loss * (self.accumulate / min(self.accumulate, self.steps_per_epoch - begun))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.accumulate and batch_idx + 1 != self.steps_per_epoch:
            return  # No step of the optimizer.
        if self.config.clip_log_alpha is not None:
            low, high = self.config.clip_log_alpha
            with changed_whole(self):
                clip_log_alpha_(self.model, low=low, high=high)
        if self.weight_average is not None:
            step = self.current_epoch * self.optimizer_steps + batch_idx // self.accumulate
            self.weight_average.update(step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.weight_average is not None:
            checkpoint["weight_average"] = self.weight_average.tensors

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.weight_average is not None:
            self.weight_average.load(checkpoint["weight_average"])

    @contextmanager
    def with_averaged_weights(self) -> Iterator[nn.Module]:
        """The model with the weights that count: their average where there is one."""
        with self.weight_average.shown() if self.weight_average else nullcontext():
            yield self.model

    def _outputs(self, inputs: Any) -> Tensor:
        if self.config.objective == "samples":
            return outputs_of(self.model, inputs)
        return propagated(self.model, lambda: outputs_of(self.model, inputs))

    def _data_loss_and_nll(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What is minimised, and what is recorded: they differ where labels are smoothed."""
        if isinstance(outputs, RandomTensor):
            smoothing = self.config.label_smoothing
            nll = expected_nll(outputs, targets, self.likelihood)
            if self.likelihood is not None or smoothing == 0:
                return nll, nll
            return expected_nll(outputs, targets, label_smoothing=smoothing), nll
        if self.likelihood is not None:
            nll = self.likelihood.nll(outputs, targets)
            return nll, nll
        nll = F.cross_entropy(outputs, targets)
        smoothing = self.config.label_smoothing
        if smoothing == 0:
            return nll, nll
        uniform = outputs.logsumexp(1).mean() - outputs.mean()
        return (1 - smoothing) * nll + smoothing * uniform, nll


def _require_rate_of_log_alpha(groups: list[dict[str, Any]], config: TrainingConfig) -> None:
    if config.log_alpha_lr is None and any(group["name"] == "log_alpha" for group in groups):
        raise ValueError(
            "optimizer='sgd' trains log α and log-variances by Adam, which needs a learning rate "
            f"of its own, not SGD's lr={config.lr}; set log_alpha_lr, usually 1e-3 to 3e-2."
        )


class EpochAverages:
    """Averages over the examples that an epoch has seen so far."""

    def __init__(self):
        self.num_objects = 0
        self.nll_sum = self.loss_sum = self.beta = 0.0

    def add(self, nll: float, loss: float, num_objects: int, beta: float) -> None:
        self.nll_sum += nll * num_objects
        self.loss_sum += loss * num_objects
        self.num_objects += num_objects
        self.beta = beta

    @property
    def nll(self) -> float:
        return self.nll_sum / max(self.num_objects, 1)

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.num_objects, 1)
