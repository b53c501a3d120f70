"""Training a model in a folder, and resuming there as if nothing had happened."""

from __future__ import annotations

import logging
import re
import shutil
import signal
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zeromean.arguments import require_model, shown
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.extras import how_to_install
from zeromean.files.lock import locked
from zeromean.training.checkpoint import CheckpointFolder, require_same_run
from zeromean.training.config import TrainingConfig
from zeromean.training.precision import require_precision
from zeromean.training.randomness import derived_seed, isolated
from zeromean.training.weight_average import put_average_

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from zeromean.data import Batches, ImageSet
    from zeromean.data.batches import Augmentation, EpochAugmentation
    from zeromean.training.recorder import Recorder

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


def fit(
    model: nn.Module,
    train: ImageSet,
    config: TrainingConfig,
    *,
    folder: Path | str,
    test: ImageSet | None = None,
    callbacks: Sequence[pl.Callback] = (),
    progress: bool = True,
    on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None = None,
    augment: Augmentation | EpochAugmentation | None = None,
) -> FitResult:
    """Train a classifier on the CPU, in place; resumes by itself.

    The folder gets `checkpoint.ckpt` after every epoch (and the one before as
    `checkpoint.previous.ckpt`), `metrics.jsonl` with one line for each epoch, and `logs/` for
    spreadsheets and TensorBoard. Called again with the same arguments after a crash, it goes on
    after the last complete epoch and ends with the same weights, bit for bit, as if there had been
    none; after the last epoch it only loads. The global random generators are left alone.

    Args:
        folder: Folder of this run only; one that holds another run is refused, and so is one in
            which another process trains.
        test: Adds `test_accuracy` (%) and `test_nll`, each for one draw of the noise.
        callbacks: Lightning callbacks. They are not part of the checkpoint.
        progress: Show a progress bar where the output is a terminal.
        on_epoch: Called as `on_epoch(epoch, model)` after every epoch, counted from 1; returns
            more metrics. The noise that it draws does not change the training.
        augment: Passed on to `zeromean.data.Batches`.
    """
    require_lightning()
    require_model(model)
    _require_data("train", train)
    if test is not None:
        _require_data("test", test)
    if not isinstance(config, TrainingConfig):
        raise TypeError(
            f"config must be a TrainingConfig, got {shown(config)}; build one: "
            "TrainingConfig(epochs=10)."
        )
    require_precision(config.precision)
    if on_epoch is not None and not callable(on_epoch):
        raise TypeError(f"on_epoch must be a function, got {shown(on_epoch)}.")
    if len(train) == 0:
        raise ValueError("The training set is empty.")
    if test is not None and len(test) == 0:
        raise ValueError("The test set is empty; leave test= out, or give it images.")
    for data in (train, test):
        if data is not None:
            _require_classes(data)
    files = CheckpointFolder(Path(folder))
    files.create()
    # Not the name of the lock of `zeromean run`, which may train in its own folder.
    with locked(files.folder, "fit.lock"):
        return _train(model, train, config, files, test, callbacks, progress, on_epoch, augment)


def _train(
    model: nn.Module,
    train: ImageSet,
    config: TrainingConfig,
    files: CheckpointFolder,
    test: ImageSet | None,
    callbacks: Sequence[pl.Callback],
    progress: bool,
    on_epoch: Callable[[int, nn.Module], dict[str, Any]] | None,
    augment: Augmentation | EpochAugmentation | None,
) -> FitResult:
    from zeromean.data import Batches
    from zeromean.training.elbo_module import ElboModule
    from zeromean.training.recorder import Recorder

    description = _describe(model, train, config, augment)
    state = files.load()
    model.train()
    done = 0
    if state is not None:
        require_same_run(state["description"], description, files.folder)
        model.load_state_dict(state["model"])
        files.write_metrics(state["history"])
        done = state["epoch"]
        if done >= config.epochs:
            put_average_(model, state.get("average") or {})
            return FitResult(model, state["history"], files.folder, done)
        _log.info("Resuming %s after epoch %d of %d.", files.folder, done, config.epochs)

    batches = Batches(
        train,
        config.batch_size,
        seed=config.seed,
        # BatchNorm can make nothing of a single image. Which one is left over depends on the epoch.
        drop_last=len(train) > 1 and len(train) % config.batch_size == 1,
        augment=augment,
    )
    module = ElboModule(model, config, num_data=len(train), steps_per_epoch=len(batches))
    recorder = Recorder(files, description, state, test=test, on_epoch=on_epoch)
    with isolated(derived_seed(config.seed, 0)), _quiet_lightning():
        # Last, so that what other callbacks do at the end of an epoch is saved with it.
        trainer = _trainer(module, [*callbacks, recorder], files.folder, progress)
        counters: Any = trainer.fit_loop.epoch_progress.current
        counters.ready = counters.started = counters.processed = counters.completed = done
        _run(trainer, module, _loader(_OrderedByEpoch(batches, module)), recorder)
    if module.weight_average is not None:
        module.weight_average.swap_()
    return FitResult(model, recorder.history, files.folder, done)


def require_lightning() -> None:
    """Say what to install where Lightning is missing."""
    missing = [name for name in ("lightning", "tensorboard") if find_spec(name) is None]
    if missing:
        raise ImportError(how_to_install(f"Training needs {' and '.join(missing)}", "experiments"))


def _require_data(name: str, data: Any) -> None:
    from zeromean.data import ImageSet

    if not isinstance(data, ImageSet):
        raise TypeError(
            f"{name} must be a zeromean.data.ImageSet, got {shown(data)}; build one: "
            "ImageSet(images, labels, num_classes)."
        )


def _require_classes(data: ImageSet) -> None:
    labels = data.labels
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            "fit trains classifiers: labels must be classes, one integer for each image, got "
            f"{labels.dtype} of shape {tuple(labels.shape)}; zeromean.training.ElboModule takes "
            "another likelihood."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= data.num_classes:
        raise ValueError(
            f"Labels must be from 0 to {data.num_classes - 1}, as num_classes says, got {low} to "
            f"{high}."
        )


class _OrderedByEpoch:
    """The batches in the order of the epoch that Lightning is in, whenever it asks."""

    def __init__(self, batches: Batches, module: pl.LightningModule):
        self.batches = batches
        self.module = module

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.batches.set_epoch(self.module.current_epoch)
        yield from self.batches


def _trainer(
    module: Any, callbacks: list[pl.Callback | Recorder], folder: Path, progress: bool
) -> pl.Trainer:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from zeromean.training.recorder import ProgressBar

    for name in ("csv", "tensorboard"):
        # The recorder writes the epochs of a resumed run again; old files would repeat them.
        shutil.rmtree(folder / "logs" / name, ignore_errors=True)
    show_progress = progress and sys.stdout.isatty()
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=module.config.epochs,
        gradient_clip_val=module.config.clip_gradient,
        callbacks=[*callbacks, ProgressBar()] if show_progress else callbacks,
        enable_progress_bar=show_progress,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=[
            CSVLogger(folder, name="logs", version="csv"),
            TensorBoardLogger(folder, name="logs", version="tensorboard"),
        ],
        log_every_n_steps=module.steps_per_epoch,
        default_root_dir=folder,
    )


def _loader(batches: _OrderedByEpoch) -> Any:
    """What Lightning makes of the batches anyway, without the warning that it gives there.

    Lightning 2.6 builds it with a class that torch has deprecated since (its issue 21326).
    """
    from lightning.pytorch.utilities import CombinedLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        return CombinedLoader(batches, "max_size_cycle")


def _run(trainer: pl.Trainer, module: pl.LightningModule, batches: Any, recorder: Recorder) -> None:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
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


def _describe(
    model: nn.Module, train: ImageSet, config: TrainingConfig, augment: Any
) -> dict[str, Any]:
    """What has to be the same for a run to be resumed."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    text = repr(model)
    if config.prune_after_epochs is not None:
        # Masks come in the course of the run, and a model in hand may have them when it is resumed.
        for name, module in model.named_modules():
            if isinstance(module, Posterior):
                shapes.pop(f"{name}.mask" if name else "mask", None)
        text = re.sub(r", pruned|, \d+ left", "", text)
    return {
        "config": config.described(),
        "model": _without_addresses(f"{text} {shapes}"),
        "augment": _without_addresses(repr(augment)),
        "data": f"{len(train)} images, checksum {_checksum(train.images, train.labels)}",
    }


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _checksum(*tensors: Tensor) -> str:
    value = 0
    for tensor in tensors:
        content: Any = tensor.detach().cpu().contiguous().numpy()
        value = zlib.crc32(content, value)
    return f"{value:08x}"
