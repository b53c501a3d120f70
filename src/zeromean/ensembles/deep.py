"""Deep ensembles: the same network trained several times, from other initial values.

Lakshminarayanan, Pritzel and Blundell (2017). Members know nothing of each other, so they are
trained in processes of their own, and those that are done stay done.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromean.arguments import require_function, require_integer, require_model, require_seed, shown
from zeromean.files.lock import locked
from zeromean.files.model import load, save
from zeromean.prediction.ensemble import Ensemble
from zeromean.training.randomness import isolated

if TYPE_CHECKING:
    from zeromean.data import ImageSet
    from zeromean.data.batches import Augmentation, EpochAugmentation
    from zeromean.training.config import TrainingConfig


def deep_ensemble(
    train: Callable[[int], nn.Module],
    *,
    build: Callable[[], nn.Module],
    folder: str | os.PathLike[str],
    seeds: int | Sequence[int] = 5,
    processes: int = 1,
) -> Ensemble:
    """Train one member a seed with a function of yours; members that are done are only loaded.

    The folder gets `seed-0.safetensors` and so on, each when its member is complete. Called again,
    with more seeds or after a crash, only what is missing is trained. The folder belongs to one
    `train` with one setting: nothing here can tell that either has changed.

    Args:
        train: Takes a seed, with which torch's, numpy's and Python's global generators are seeded
            already, and returns a trained network. With several processes it must be defined at
            the top of a module.
        build: Makes a network of that architecture, plain or stochastic, for `zm.load` to fill.
        folder: Where members are kept.
        seeds: One seed a member, or so many members with the seeds 0, 1, ….
        processes: How many members train at the same time, each in a process of its own. A script
            then needs `if __name__ == "__main__":` around what it runs.
    """
    require_function("train", train, "a function of a seed that returns a trained network")
    require_function("build", build, "a function without arguments that returns a network")
    numbers = _seeds(seeds)
    processes = require_integer("processes", processes, at_least=1)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {seed: folder / f"seed-{seed}.safetensors" for seed in numbers}
    missing = [seed for seed in numbers if not paths[seed].exists()]
    if processes > 1:
        _require_importable(train)
    _run_all({seed: partial(_train_one, train, seed, paths[seed]) for seed in missing}, processes)
    with torch.random.fork_rng(devices=[]):
        architecture = build()
    return Ensemble([load(path, architecture) for path in paths.values()])


def fit_ensemble(
    build: Callable[[], nn.Module],
    train: ImageSet,
    config: TrainingConfig,
    *,
    folder: str | os.PathLike[str],
    seeds: int | Sequence[int] = 5,
    processes: int = 1,
    test: ImageSet | None = None,
    augment: Augmentation | EpochAugmentation | None = None,
    progress: bool = True,
) -> Ensemble:
    """Train one member a seed with `zeromean.training.fit`, which resumes in the middle of each.

    Args:
        build: Makes an untrained network, whose initial values are torch's, by the member's seed.
            With several processes it must be defined at the top of a module.
        train: As in `fit`, and so are `test`, `augment` and `progress`.
        config: That of all members, but for its seed, which is the member's.
        folder: Each member trains in `folder/seed-0` and so on.
        seeds: One seed a member, or so many members with the seeds 0, 1, ….
        processes: How many members train at the same time, each in a process of its own. A script
            then needs `if __name__ == "__main__":` around what it runs.
    """
    from zeromean.training.config import TrainingConfig
    from zeromean.training.trainer import require_lightning

    require_lightning()
    require_function("build", build, "a function without arguments that returns a network")
    if not isinstance(config, TrainingConfig):
        raise TypeError(
            f"config must be a TrainingConfig, got {shown(config)}; build one: "
            "TrainingConfig(epochs=10)."
        )
    numbers = _seeds(seeds)
    processes = require_integer("processes", processes, at_least=1)
    options: dict[str, Any] = {"test": test, "augment": augment}
    fits = {
        seed: partial(
            _fit_one,
            build,
            train,
            replace(config, seed=seed),
            folder=Path(folder) / f"seed-{seed}",
            **options,
        )
        for seed in numbers
    }
    if processes > 1:
        _require_importable(build, augment)
        _run_all(fits, processes)
    # What other processes have trained is only loaded here.
    members = []
    for seed, fit in fits.items():
        try:
            members.append(fit(progress=progress))
        except Exception as error:
            raise _failed(seed, error) from error
    return Ensemble(members)


def _train_one(train: Callable[[int], nn.Module], seed: int, path: Path) -> None:
    with locked(path.parent, f"{path.stem}.lock"):
        if path.exists():
            return
        with isolated(seed % 2**32):
            member = train(seed)
        require_model(member, "what train returns")
        save(member, path)


def _fit_one(
    build: Callable[[], nn.Module],
    train: ImageSet,
    config: TrainingConfig,
    *,
    folder: Path,
    progress: bool = False,
    **options: Any,
) -> nn.Module:
    from zeromean.training.trainer import fit

    with isolated(config.seed % 2**32):
        model = build()
    return fit(model, train, config, folder=folder, progress=progress, **options).model.eval()


def _run_all(tasks: dict[int, Callable[[], Any]], processes: int) -> None:
    """Run what trains a member, by its seed; the first error ends what has not begun."""
    if processes == 1 or len(tasks) < 2:
        for seed, task in tasks.items():
            try:
                task()
            except Exception as error:
                raise _failed(seed, error) from error
        return
    threads = max(1, torch.get_num_threads() // processes)
    pool = ProcessPoolExecutor(
        min(processes, len(tasks)),
        mp_context=multiprocessing.get_context("spawn"),  # Threads of torch do not survive a fork.
        initializer=torch.set_num_threads,
        initargs=(threads,),
    )
    with pool:
        seed_of: dict[Future[None], int] = {
            pool.submit(_without_result, task): seed for seed, task in tasks.items()
        }
        try:
            wait(seed_of, return_when=FIRST_EXCEPTION)
        finally:
            for future in seed_of:
                future.cancel()
    for future, seed in seed_of.items():
        if not future.cancelled() and (error := future.exception()) is not None:
            raise _failed(seed, error) from error


def _without_result(task: Callable[[], Any]) -> None:
    """What has been trained is on disk, and need not come back."""
    task()


def _failed(seed: int, error: BaseException) -> RuntimeError:
    reason = str(error) or type(error).__name__
    if isinstance(error, BrokenProcessPool):
        reason = "its process, or that of another member, was ended from outside"
    return RuntimeError(
        f"The member with seed {seed} could not be trained: {reason.rstrip('.')}. What other "
        "members have done is kept; run it again to go on."
    )


def _require_importable(*parts: Any) -> None:
    try:
        pickle.dumps(parts)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"Other processes cannot import what trains a member ({error}); define it at the top "
            "of a module, or use processes=1."
        ) from error


def _seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, (str, bytes)) or not isinstance(seeds, Sequence):
        return list(range(require_integer("seeds", seeds, at_least=1)))
    numbers = [require_seed(seed) for seed in seeds]
    if not numbers:
        raise ValueError("An ensemble needs at least one seed, got none.")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"Every member needs a seed of its own, got {shown(numbers)}.")
    return numbers
