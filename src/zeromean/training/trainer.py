"""Training a model in a folder, and resuming there as if nothing had happened."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor, nn

from zeromean.arguments import (
    require_choice,
    require_flag,
    require_function,
    require_model,
    shown,
)
from zeromean.extras import how_to_install
from zeromean.files.lock import locked
from zeromean.training.checkpoint import CheckpointFolder, require_same_run
from zeromean.training.children import children, pickled_job
from zeromean.training.config import TrainingConfig
from zeromean.training.data_sources import (
    Data,
    data_source,
    describe_data,
    from_module,
    is_module,
)
from zeromean.training.description import describe
from zeromean.training.devices import (
    Accelerator,
    Strategy,
    chosen_accelerator,
    device_of,
)
from zeromean.training.distributed import (
    ALONE,
    Group,
    group_of,
    is_about_others,
    launched_elsewhere,
)
from zeromean.training.early_stopping import best_epoch, is_over
from zeromean.training.job import Job, OnBatch, why_inexact, world_size_of
from zeromean.training.likelihoods import Likelihood, as_likelihood
from zeromean.training.precision import require_precision
from zeromean.training.torchrun import served_group
from zeromean.training.training_sets import require_sets

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from zeromean.data.batches import Augmentation, EpochAugmentation

_log = logging.getLogger("zeromean.training")


@dataclass(frozen=True)
class FitResult:
    """What a run leaves behind."""

    model: nn.Module
    """The model that was given, trained in place."""
    history: list[dict[str, Any]]
    """The rows of `metrics.jsonl`, one for each epoch."""
    folder: Path
    resumed_from: int
    """Epochs that were already done when the run started; 0 for a fresh one."""
    best_epoch: int | None = None
    """The epoch whose weights the model has, where a metric is monitored; else it has the last."""
    inexact: tuple[str, ...] = ()
    """Why this run, interrupted or repeated, may end with other weights in their last digits or
    more. Empty where it ends with the same ones bit for bit."""


def fit(
    model: nn.Module,
    train: Data | pl.LightningDataModule,
    config: TrainingConfig,
    *,
    folder: Path | str,
    validation: Data | None = None,
    test: Data | None = None,
    likelihood: Likelihood | Callable[[Tensor, Tensor], Tensor] | None = None,
    accelerator: Accelerator = "auto",
    devices: int | None = None,
    strategy: Strategy = "ddp",
    sync_batchnorm: bool = False,
    num_data: int | None = None,
    steps_per_epoch: int | None = None,
    callbacks: Sequence[pl.Callback] = (),
    progress: bool = True,
    on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None = None,
    augment: Augmentation | EpochAugmentation | None = None,
    on_batch: OnBatch | None = None,
) -> FitResult:
    """Train a model in place; resumes by itself.

    The folder gets `checkpoint.ckpt` after every epoch (and the one before as
    `checkpoint.previous.ckpt`), `metrics.jsonl` with one line for each epoch, and `logs/` for
    spreadsheets and TensorBoard. Called again with the same arguments after a crash, it goes on
    after the last complete epoch, and on one CPU ends with the same weights, bit for bit, as if
    there had been none (`FitResult.inexact` says where that is not so); after the last epoch it
    only loads. The global random generators are left alone.

    Args:
        train: A pair of tensors `(inputs, targets)`, an `ImageSet`, a torch Dataset, a DataLoader
            or anything else that gives batches whenever it is iterated over, or a
            LightningDataModule. A batch is `(inputs, targets)`, or a mapping of the model's
            arguments with the targets under `labels` or `targets` in it.
        folder: Folder of this run only; one that holds another run is refused, and so is one in
            which another process trains.
        validation: Data like `train`: adds `validation_accuracy` (%) and `validation_nll`, each for
            one draw of the noise, or with a likelihood `validation_nll` and `validation_rmse`;
            what `TrainingConfig.monitor` names stops the run and chooses its weights.
        test: The same under `test_…`, for data that nothing is chosen by.
        likelihood: The data term: `zm.GaussianLikelihood()` and others with a method
            `nll(outputs, targets)`, whose parameters are trained too, or a function of outputs and
            targets that gives the mean negative log-likelihood. Default: targets are classes.
        accelerator: "cpu", "cuda" (or "gpu"), "mps", or "auto": the best that is there.
        devices: Processes that share every mini-batch, each with a GPU or on the CPU. Default:
            those that torchrun has started, else one.
        strategy: "ddp": each process has the whole model. "fsdp": gradients and the optimizer's
            moments are divided among them, and so are parameters between steps.
        sync_batchnorm: BatchNorm's statistics are those of all processes.
        num_data: Examples in the whole training set, for loaders that do not know.
        steps_per_epoch: Batches of an epoch, for loaders that do not know.
        callbacks: Lightning callbacks, for the first process. They are not part of the checkpoint.
        progress: Show a progress bar where the output is a terminal.
        on_epoch: Called as `on_epoch(epoch, model)` after every epoch, counted from 1, in the first
            process; returns more metrics. The noise that it draws does not change the training.
        augment: Passed on to `zeromean.data.Batches`, for tensors.
        on_batch: Called as `on_batch(inputs, targets)` with every batch of the training, on its
            device and in every process; gives the inputs and targets to train on: mixtures of
            examples, or what a teacher says of them. `likelihood` is what reads the targets.
    """
    require_lightning()
    require_model(model)
    if not isinstance(config, TrainingConfig):
        raise TypeError(
            f"config must be a TrainingConfig, got {shown(config)}; build one: "
            "TrainingConfig(epochs=10)."
        )
    if on_epoch is not None and not callable(on_epoch):
        raise TypeError(f"on_epoch must be a function, got {shown(on_epoch)}.")
    if on_batch is not None:
        require_function("on_batch", on_batch, "lambda inputs, targets: (inputs, targets)")
    likelihood = as_likelihood(likelihood)
    require_sets(likelihood, train=train, validation=validation, test=test)
    device_of(model)
    accelerator_here = chosen_accelerator(accelerator)
    require_precision(config.precision, accelerator_here)
    require_choice("strategy", strategy, get_args(Strategy))
    job = Job(
        model=model,
        train=train,
        config=config,
        folder=Path(folder),
        validation=validation,
        test=test,
        likelihood=likelihood,
        accelerator=accelerator_here,
        strategy=strategy,
        sync_batchnorm=require_flag("sync_batchnorm", sync_batchnorm),
        num_data=num_data,
        steps_per_epoch=steps_per_epoch,
        augment=augment,
        on_batch=on_batch,
    )
    elsewhere = launched_elsewhere()
    world_size = world_size_of(devices, elsewhere, job)
    with ExitStack() as stack:
        if world_size == 1:
            group = ALONE
        elif (served := served_group()) is not None:
            group = served
            group.share([pickled_job(job)])
        elif elsewhere is not None:
            rank, world_size = elsewhere
            group = stack.enter_context(group_of(rank, world_size, accelerator_here))
        else:
            CheckpointFolder(job.folder).create()  # Before anything is started.
            group = stack.enter_context(children(help_to_train, job, world_size, accelerator_here))
        try:
            return _train(job, group, callbacks, progress, on_epoch)
        except RuntimeError as error:
            if elsewhere is None or not is_about_others(error):
                raise
            raise ChildProcessError(
                f"Another of the {world_size} processes of this training has ended; run again to "
                "go on after the last complete epoch."
            ) from error


def require_lightning() -> None:
    """Say what to install where Lightning is missing."""
    missing = [name for name in ("lightning", "tensorboard") if find_spec(name) is None]
    if missing:
        raise ImportError(how_to_install(f"Training needs {' and '.join(missing)}", "experiments"))


def help_to_train(job: Job, group: Group) -> None:
    """What a process does that is there for this training alone."""
    _train(job, group, (), False, None)


def _train(
    job: Job,
    group: Group,
    callbacks: Sequence[pl.Callback],
    progress: bool,
    on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None,
) -> FitResult:
    files = CheckpointFolder(job.folder)
    with ExitStack() as stack:
        # Not the name of the lock of `zeromean run`, which may train in its own folder.
        group.first(lambda: (files.create(), stack.enter_context(locked(files.folder, "fit.lock"))))
        return _train_locked(job, group, files, callbacks, progress, on_epoch)


def _train_locked(
    job: Job,
    group: Group,
    files: CheckpointFolder,
    callbacks: Sequence[pl.Callback],
    progress: bool,
    on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None,
) -> FitResult:
    from zeromean.training.lightning_run import run

    job = _with_loaders(job, group)
    model, config = job.model, job.config
    source = data_source(
        job.train,
        config,
        num_data=job.num_data,
        steps_per_epoch=job.steps_per_epoch,
        augment=job.augment,
        rank=group.rank,
        num_ranks=group.world_size,
    )
    description = describe(
        model,
        config,
        data=source.description or describe_data(job.train),
        augment=job.augment,
        likelihood=job.likelihood,
        validation=None if job.validation is None else describe_data(job.validation),
        on_batch=job.on_batch,
    )

    def found() -> dict[str, Any] | None:
        state = files.load()
        if state is not None:
            require_same_run(state["description"], description, files.folder)
            files.write_metrics(state["history"])
        return state

    state = group.first(found)
    model.train()
    done = 0 if state is None else state["epoch"]
    if state is not None:
        model.load_state_dict(state["model"])
        if is_over(state["history"], config):
            return _finished(job, state["history"], state, done, why_inexact(job, source, state))
        _load_likelihood(job, state)
        _log.info("Resuming %s after epoch %d of %d.", files.folder, done, config.epochs)
    device = device_of(model)
    recorder = run(
        job,
        source,
        group,
        files=files,
        description=description,
        state=state,
        callbacks=callbacks,
        progress=progress,
        on_epoch=on_epoch,
    )
    model.to(device)  # Lightning leaves it on the CPU.
    left = {"best": recorder.best, "processes": recorder.processes}
    return _finished(job, recorder.history, left, done, why_inexact(job, source, left))


def _finished(
    job: Job,
    history: list[dict[str, Any]],
    state: dict[str, Any],
    done: int,
    inexact: tuple[str, ...],
) -> FitResult:
    """The result of a run that is over, with the weights that count in the model."""
    best = state.get("best")
    if best is not None:
        job.model.load_state_dict(best["model"])
    elif state.get("average"):
        from zeromean.training.weight_average import put_average_

        put_average_(job.model, state["average"])
    _load_likelihood(job, best or state)
    epoch = None if best is None else best_epoch(history, job.config)
    return FitResult(job.model, history, job.folder, done, epoch, inexact)


def _load_likelihood(job: Job, state: dict[str, Any]) -> None:
    found = state.get("likelihood")
    if found and isinstance(job.likelihood, nn.Module):
        job.likelihood.load_state_dict(found)


def _with_loaders(job: Job, group: Group) -> Job:
    """The job with the loaders of its data module, where it has one."""
    if not is_module(job.train):
        return job
    train, validation = from_module(job.train, group.first)
    return replace(job, train=train, validation=job.validation or validation)
