"""The Lightning callbacks of a run: what it records and saves each epoch, and its progress bar."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor, nn

from zeromean.layers.blocks import restored_modes
from zeromean.prediction.classification import predict_proba
from zeromean.training.checkpoint import CheckpointFolder
from zeromean.training.elbo_module import ElboModule
from zeromean.training.layer_monitor import (
    describe_parameters,
    layer_metrics,
    new_variance_layers,
    not_finite_parameters,
)
from zeromean.training.randomness import (
    derived_seed,
    isolated,
    random_state,
    set_random_state,
)
from zeromean.training.weight_average import WeightAverage

if TYPE_CHECKING:
    from zeromean.data import ImageSet

_log = logging.getLogger("zeromean.training")
_TEST_BATCH = 1000


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
        test: ImageSet | None,
        on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None,
    ):
        self.files = files
        self.description = description
        self.state = state
        self.test = test
        self.on_epoch = on_epoch
        self.history: list[dict[str, Any]] = [] if state is None else list(state["history"])
        self.interrupt: KeyboardInterrupt | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for row in self.history:
            _send_to_loggers(trainer, row)
        if self.state is not None:
            # Only here do the optimizer and the scheduler exist.
            trainer.optimizers[0].load_state_dict(self.state["optimizer"])
            _scheduler(trainer).load_state_dict(self.state["scheduler"])
            set_random_state(self.state["random"])
            average = _weight_average(pl_module)
            if average is not None:
                average.load(self.state["average"])
            self.state = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, ElboModule)
        model, epoch = pl_module.model, trainer.current_epoch + 1
        parameters = not_finite_parameters(model)
        if parameters:
            raise ValueError(f"After epoch {epoch} {describe_parameters(parameters)}.")
        # Looking must not change what comes next: training is the same with and without it.
        seed = derived_seed(pl_module.config.seed, 1, epoch)
        with isolated(seed), pl_module.with_averaged_weights():
            row = self._metrics(pl_module, epoch, trainer)
        self.history.append(row)
        average = _weight_average(pl_module)
        self.files.save(
            {
                "description": self.description,
                "epoch": epoch,
                "model": dict(model.state_dict()),
                "average": None if average is None else average.tensors,
                "optimizer": trainer.optimizers[0].state_dict(),
                "scheduler": _scheduler(trainer).state_dict(),
                "random": random_state(),
                "history": self.history,
            }
        )
        self.files.append_metrics(row)
        _send_to_loggers(trainer, row)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, KeyboardInterrupt):
            self.interrupt = exception

    def _metrics(self, module: ElboModule, epoch: int, trainer: pl.Trainer) -> dict[str, Any]:
        model, averages = module.model, module.averages
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
        with restored_modes(model):
            if self.test is not None:
                row |= _test_metrics(model, self.test, seed=module.config.seed)
            if self.on_epoch is not None:
                row |= self.on_epoch(epoch, model)
        return {name: _plain(name, value) for name, value in row.items()}


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with the loss and the data term of the epoch so far."""

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        assert isinstance(pl_module, ElboModule)
        averages = pl_module.averages
        return {"loss": f"{averages.loss:.4f}", "nll": f"{averages.nll:.4f}"}


def _test_metrics(model: nn.Module, test: ImageSet, *, seed: int) -> dict[str, float]:
    """Accuracy (%) and negative log-likelihood of one draw of the noise."""
    hits, nll = 0, 0.0
    pairs = zip(test.images.split(_TEST_BATCH), test.labels.split(_TEST_BATCH), strict=True)
    for index, (images, labels) in enumerate(pairs):
        noise_seed = derived_seed(seed, 2, index)
        probabilities = predict_proba(model, images, num_samples=1, seed=noise_seed)
        chosen = probabilities.gather(1, labels.unsqueeze(1))
        hits += int((probabilities.argmax(1) == labels).sum())
        nll -= float(chosen.clamp_min(torch.finfo(chosen.dtype).tiny).log().sum())
    return {"test_accuracy": 100 * hits / len(test.labels), "test_nll": nll / len(test.labels)}


def _weight_average(module: pl.LightningModule) -> WeightAverage | None:
    assert isinstance(module, ElboModule)
    return module.weight_average


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
