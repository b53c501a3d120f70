"""The Lightning callbacks of a run: what it records and saves each epoch, and its progress bar."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor, nn

from zeromean.layers.blocks import restored_modes
from zeromean.training.checkpoint import CheckpointFolder
from zeromean.training.data_sources import Data
from zeromean.training.distributed import ALONE, Group
from zeromean.training.early_stopping import best_epoch, is_over
from zeromean.training.elbo_module import ElboModule
from zeromean.training.evaluation import evaluate
from zeromean.training.layer_monitor import (
    describe_parameters,
    layer_metrics,
    new_variance_layers,
    not_finite_parameters,
)
from zeromean.training.optimizers import load_state_
from zeromean.training.randomness import (
    derived_seed,
    isolated,
    random_state,
    set_random_state,
)
from zeromean.training.ranks import seed_rank
from zeromean.training.sharding import WholeModel, gathered, shard_moments_
from zeromean.training.sync_batchnorm import running_statistics

_log = logging.getLogger("zeromean.training")
# Streams of noise, one for each set that is looked at.
_STREAMS = {"test": 2, "validation": 4}


class Recorder(pl.Callback):
    """Records an epoch's metrics and saves it; puts a resumed run back where it was.

    Lightning's own checkpoints are not used: they hold neither the random generators nor the
    metrics, where their loop counters resume depends on the hook that saved them and on the
    version, and a file that is cut short is not noticed until it is too late. Here an epoch is
    the unit: everything that decides the next one is in the checkpoint.
    """

    def __init__(
        self,
        files: CheckpointFolder,
        description: dict[str, Any],
        state: dict[str, Any] | None,
        *,
        whole: WholeModel,
        sets: Mapping[str, Data],
        on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None,
        group: Group = ALONE,
    ):
        self.files = files
        self.description = description
        self.state = state
        self.whole = whole
        self.sets = sets
        self.on_epoch = on_epoch
        self.group = group
        self.history: list[dict[str, Any]] = [] if state is None else list(state["history"])
        # Of the best epoch, where a metric is monitored: the model's state, and the likelihood's.
        self.best: dict[str, Any] | None = None if state is None else state.get("best")
        self.processes: list[int] = [] if state is None else list(state.get("processes", [1]))
        self.interrupt: KeyboardInterrupt | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, ElboModule)
        average = pl_module.weight_average
        if average is not None:
            average.follow_model()
        if self.group.is_first:
            for row in self.history:
                _send_to_loggers(trainer, row)
        if self.group.world_size not in self.processes:
            self.processes.append(self.group.world_size)
        if self.state is not None:
            # Only here do the optimizer and the scheduler exist.
            load_state_(trainer.optimizers[0], self.state["optimizer"])
            shard_moments_(trainer.optimizers[0])
            _scheduler(trainer).load_state_dict(self.state["scheduler"])
            trainer.precision_plugin.load_state_dict(self.state.get("scaler") or {})
            set_random_state(self.state["random"])
            if average is not None:
                average.load(self.state["average"])
            self.state = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, ElboModule)
        if self.group.world_size > 1:
            # Of the epoch, so that nothing but the weights goes on from a checkpoint.
            numbers = pl_module.config.seed, self.group.world_size, trainer.current_epoch
            seed_rank(self.group.rank, derived_seed(*numbers))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, ElboModule)
        epoch = trainer.current_epoch + 1
        self._share_statistics(pl_module)
        # Looking must not change what comes next: training is the same with and without it.
        seed = derived_seed(pl_module.config.seed, 1, epoch)
        with isolated(seed), pl_module.with_averaged_weights():
            self.whole.take_(pl_module)
            model, likelihood = self.whole.model, self.whole.likelihood
            # An average is not finite either where a weight is not.
            parameters = not_finite_parameters(model)
            if parameters:
                raise ValueError(f"After epoch {epoch} {describe_parameters(parameters)}.")
            looked = self._look(pl_module)
            row = self.group.first(lambda: self._metrics(pl_module, epoch, trainer, looked))
            self.history.append(row)
            if best_epoch(self.history, pl_module.config) == epoch:
                self.best = {"model": _copied(model), "likelihood": None}
                if pl_module.likelihood_state is not None:
                    self.best["likelihood"] = _copied(likelihood)
        state = self._state(pl_module, epoch, trainer)
        self.group.first(lambda: self.files.save(state))
        if self.group.is_first:
            self.files.append_metrics(row)
            _send_to_loggers(trainer, row)
        if is_over(self.history, pl_module.config):
            trainer.should_stop = True

    def _share_statistics(self, module: ElboModule) -> None:
        """Give all processes what BatchNorm of the first has seen, of which each has seen its own.

        The average of the weights has one of these, too.
        """
        statistics = running_statistics(module.model)
        self.group.copy_first_(statistics.values())
        if module.weight_average is not None:
            averages = module.weight_average.tensors
            self.group.copy_first_(averages[name] for name in statistics if name in averages)

    def _state(self, module: ElboModule, epoch: int, trainer: pl.Trainer) -> dict[str, Any]:
        """What a checkpoint holds; all processes have a part in it where the model is sharded."""
        average = module.weight_average
        state = {
            "description": self.description,
            "epoch": epoch,
            "model": dict(module.model.state_dict()),
            "average": None if average is None else average.tensors,
            "optimizer": trainer.optimizers[0].state_dict(),
            "scheduler": _scheduler(trainer).state_dict(),
            "random": random_state(),
            "processes": self.processes,
        }
        if module.likelihood_state is not None:
            state["likelihood"] = dict(module.likelihood_state.state_dict())
        if scaler := trainer.precision_plugin.state_dict():
            state["scaler"] = scaler
        if self.best is not None:
            state["best"] = self.best
        return {**gathered(state), "history": self.history}

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, KeyboardInterrupt):
            self.interrupt = exception

    def _look(self, module: ElboModule) -> dict[str, Any]:
        """What all processes have a part in: sums over the epoch, and the sets to look at."""
        averages, found = module.averages, {}
        sums = [averages.num_objects, averages.nll_sum, averages.loss_sum]
        count, averages.nll_sum, averages.loss_sum = self.group.sums(sums)
        averages.num_objects = round(count)
        model, likelihood = self.whole.model, self.whole.likelihood
        with restored_modes(model):
            for name, data in self.sets.items():
                metrics = evaluate(
                    model,
                    data,
                    likelihood,
                    seed_of=partial(derived_seed, module.config.seed, _STREAMS[name]),
                    device=module.device,
                    group=self.group,
                )
                found |= {f"{name}_{metric}": value for metric, value in metrics.items()}
        return found

    def _metrics(
        self, module: ElboModule, epoch: int, trainer: pl.Trainer, looked: dict[str, Any]
    ) -> dict[str, Any]:
        model, averages = self.whole.model, module.averages
        layers = layer_metrics(model)
        kl = math.fsum(value for name, value in layers.items() if name.startswith("kl/"))
        data_term = -module.num_data * averages.nll
        converged = new_variance_layers(layers, self.history)
        for name, log_alpha in converged.items():
            _log.info(
                "Layer %s has become a variance layer in epoch %d (effective log α %.1f).",
                name,
                epoch,
                log_alpha,
            )
        row = {
            "epoch": epoch,
            "loss": averages.loss,
            "nll": averages.nll,
            "kl": kl,
            "data_term": data_term,
            "elbo": data_term - kl,
            "beta": averages.beta,
            "lr": _scheduler(trainer).get_last_lr()[0],
            **layers,
            "new_variance_layers": list(converged),
        }
        row |= looked
        if self.on_epoch is not None:
            with restored_modes(model):
                row |= self.on_epoch(epoch, model)
        return {name: _plain(name, value) for name, value in row.items()}


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with the loss and the data term of the epoch so far."""

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        assert isinstance(pl_module, ElboModule)
        averages = pl_module.averages
        return {"loss": f"{averages.loss:.4f}", "nll": f"{averages.nll:.4f}"}


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _scheduler(trainer: pl.Trainer) -> Any:
    return trainer.lr_scheduler_configs[0].scheduler


def _send_to_loggers(trainer: pl.Trainer, row: dict[str, Any]) -> None:
    scalars = {n: float(v) for n, v in row.items() if isinstance(v, int | float) and n != "epoch"}
    for logger in trainer.loggers:
        logger.log_metrics(scalars, step=row["epoch"])
        logger.save()


def _plain(name: str, value: Any) -> Any:
    """A value as JSON has it; None for infinities and NaN, for which JSON has no word."""
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    raise TypeError(
        f"The metric {name} must be made of numbers, strings and lists, got a "
        f"{type(value).__name__}."
    )
