"""A training on Lightning's Trainer: in which processes, on which devices, and how it ends."""

from __future__ import annotations

import copy
import inspect
import logging
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeromean.training.checkpoint import CheckpointFolder
from zeromean.training.data_sources import DataSource, EpochBatches
from zeromean.training.distributed import Group
from zeromean.training.elbo_module import ElboModule
from zeromean.training.precision import gradient_scaler
from zeromean.training.randomness import derived_seed, isolated
from zeromean.training.recorder import ProgressBar, Recorder
from zeromean.training.sharding import WholeModel, shard_
from zeromean.training.sync_batchnorm import forward_reads_buffers

if TYPE_CHECKING:
    from zeromean.training.job import Job

# Its name before torch 2.13 has been deprecated since.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def run(
    job: Job,
    source: DataSource,
    group: Group,
    *,
    files: CheckpointFolder,
    description: dict[str, Any],
    state: dict[str, Any] | None,
    callbacks: Sequence[pl.Callback],
    progress: bool,
    on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None,
) -> Recorder:
    """Train from a state, or from the start, to the end; the recorder knows what has come of it."""
    config = job.config
    sets = {"test": job.test, "validation": job.validation}
    several = group.world_size > 1
    model, likelihood = job.model, job.likelihood
    if several and job.strategy == "fsdp":
        # What has been divided cannot be put together again: it is a copy.
        model, likelihood = copy.deepcopy((model, likelihood))
    module = ElboModule(
        model,
        config,
        num_data=source.num_data,
        steps_per_epoch=len(source.batches),
        likelihood=likelihood,
        sync_batchnorm=several and job.sync_batchnorm,
        on_batch=job.on_batch,
    )
    recorder = Recorder(
        files,
        description,
        state,
        whole=WholeModel(job.model, job.likelihood),
        sets={name: data for name, data in sets.items() if data is not None},
        on_epoch=on_epoch,
        group=group,
    )
    with isolated(derived_seed(config.seed, 0)), _quiet_lightning():
        # Last, so that what other callbacks do at the end of an epoch is saved with it.
        trainer = _trainer(job, module, group, [*callbacks, recorder], progress)
        counters: Any = trainer.fit_loop.epoch_progress.current
        done = 0 if state is None else state["epoch"]
        counters.ready = counters.started = counters.processed = counters.completed = done
        _fit(trainer, module, _loader(_OrderedByEpoch(source.batches, module)), recorder)
    if module.weight_average is not None:
        module.weight_average.swap_()
    recorder.whole.take_(module)
    return recorder


class _OrderedByEpoch:
    """The batches in the order of the epoch that Lightning is in, whenever it asks."""

    def __init__(self, batches: EpochBatches, module: pl.LightningModule):
        self.batches = batches
        self.module = module

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.batches.set_epoch(self.module.current_epoch)
        yield from self.batches


class _Processes(ClusterEnvironment):
    """Tells Lightning of processes that it need not start."""

    def __init__(self, group: Group):
        self.group = group

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0  # The process group is there already.

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.group.world_size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.group.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self.group.local_rank

    def node_rank(self) -> int:
        return self.group.rank // self.group.local_size


def _trainer(
    job: Job, module: ElboModule, group: Group, callbacks: list[Any], progress: bool
) -> pl.Trainer:
    folder = job.folder
    loggers: Any = False
    if group.is_first:
        for name in ("csv", "tensorboard"):
            # The recorder writes the epochs of a resumed run again; old files would repeat them.
            shutil.rmtree(folder / "logs" / name, ignore_errors=True)
        loggers = [
            CSVLogger(folder, name="logs", version="csv"),
            TensorBoardLogger(folder, name="logs", version="tensorboard"),
        ]
    show_progress = progress and group.is_first and sys.stdout.isatty()
    options: dict[str, Any] = {}
    if group.world_size > 1:
        strategy = _Sharded if job.strategy == "fsdp" else DDPStrategy
        # Gradients are summed where they are computed, without a copy there and back.
        ddp: dict[str, Any] = {"gradient_as_bucket_view": True}
        if not forward_reads_buffers(module.model):
            # The recorder copies statistics at the end of an epoch, before anybody reads them. Here
            # all processes would wait for that at every step.
            ddp[_SYNC_BUFFERS] = False
        options["strategy"] = strategy(cluster_environment=_Processes(group), **ddp)
        options["num_nodes"] = group.world_size // group.local_size
    if module.config.precision == "float16":
        options["plugins"] = [gradient_scaler(job.accelerator)]
    return pl.Trainer(
        accelerator=job.accelerator,
        devices=group.local_size,
        max_epochs=module.config.epochs,
        gradient_clip_val=module.config.clip_gradient,
        accumulate_grad_batches=module.config.accumulate,
        callbacks=[*callbacks, ProgressBar()] if show_progress else callbacks,
        enable_progress_bar=show_progress,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        logger=loggers,
        log_every_n_steps=module.steps_per_epoch,
        default_root_dir=Path(folder),
        **options,
    )


class _Sharded(DDPStrategy):
    """Lightning's DDP with FSDP2 in place of DistributedDataParallel.

    Lightning's own strategy for FSDP2 is for GPUs: on CPUs it asks for the index of a device.
    """

    def _setup_model(self, model: nn.Module) -> Any:
        shard_(model, self.root_device, self.world_size, "training_step")
        return model

    def _register_ddp_hooks(self) -> None:
        """There is no DistributedDataParallel to register them with."""


def _loader(batches: _OrderedByEpoch) -> Any:
    """What Lightning makes of the batches anyway, without the warning that it gives there.

    Lightning 2.6 builds it with a class that torch has deprecated since (its issue 21326).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        return CombinedLoader(batches, "max_size_cycle")


def _fit(trainer: pl.Trainer, module: ElboModule, batches: Any, recorder: Recorder) -> None:
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with warnings.catch_warnings():
            if module.config.precision == "float16":
                # A first step that overflows is left out, and the rates go on.
                warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\).*before")
            trainer.fit(module, batches)
    except SIGTERMException:
        # Lightning would leave the interpreter as if nothing had happened.
        print(
            f"terminated; run again to go on after epoch {len(recorder.history)}", file=sys.stderr
        )
        raise SystemExit(128 + signal.SIGTERM) from None
    except SystemExit:
        if recorder.interrupt is None:
            raise
        # Lightning answers Ctrl-C by ignoring further ones for good and leaving the interpreter.
        signal.signal(signal.SIGINT, on_interrupt)
        raise recorder.interrupt from None


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Without what Lightning says about hardware and products on every run."""
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
