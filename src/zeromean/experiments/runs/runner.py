"""Runs experiments: a folder for each run, finished ones skipped, interrupted ones resumed.

    runs/<name>/<digest of the configuration>/seed-<n>/config.json    what it is
                                                       metrics.jsonl  what it said on the way
                                                       stages/        what it need not do again
                                                       done.json      the final metrics
    runs/models/                                                      networks, shared by all

A run that is stopped, by Ctrl-C or worse, goes on where it was when it is started again.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from zeromean.experiments import registry
from zeromean.experiments.runs import provenance
from zeromean.experiments.runs.checksum import sealed
from zeromean.experiments.runs.identity import as_tuple, command, identity, run_folder
from zeromean.experiments.runs.json_files import read_json, write_json
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.runs.processes import run_in_processes
from zeromean.files.lock import locked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where runs go and where they find their data."""

    runs: Path = Path("runs")
    data_dir: Path | None = None
    progress: bool = True


def run_experiment(
    name: str,
    config: Any,
    seeds: Sequence[int] = (0,),
    *,
    place: Place = Place(),
    jobs: int = 1,
    dask: str | None = None,
) -> list[Path]:
    """Run an experiment for every seed and return the folders of the runs.

    Args:
        jobs: Processes at a time, of one thread each; with 1 everything runs in this process.
        dask: Address of a Dask scheduler, whose workers then make the runs.

    Raises:
        ValueError: For what the user can mend; so are the others of MENDABLE.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")
    if not seeds or min(seeds) < 0 or max(seeds) >= 2**32:
        raise ValueError(f"seeds must be numbers from 0 to 2³² - 1, got {list(seeds)}.")
    _require_sensible(config, registry.load(name).Config())
    configs = [dataclasses.replace(config, seed=seed) for seed in dict.fromkeys(seeds)]
    folders = [run_folder(name, c, place.runs) for c in configs]
    pending = [
        c for c, folder in zip(configs, folders, strict=True) if not is_finished(name, c, folder)
    ]
    if place.progress and len(pending) < len(configs):
        print(f"{len(configs) - len(pending)} of {len(configs)} finished before", file=sys.stderr)
    if dask is not None:
        from zeromean.experiments.runs.cluster import run_many

        run_many(name, pending, place=place, client=dask)
    elif jobs == 1 or not pending:
        from zeromean.training.torchrun import led_by_the_first

        with led_by_the_first() as is_first:
            if not is_first:
                return []  # The first has written everything.
            for c in pending:
                run_one(name, c, place)
    elif int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            "--jobs gives each run a process of its own, and torchrun one run several; choose one."
        )
    else:
        run_in_processes(partial(run_one, name, place=place), pending, jobs)
    return folders


def _require_sensible(config: Any, usual: Any) -> None:
    """Refuse what no option can mean, before anything is trained."""
    for field in dataclasses.fields(config):
        option = f"--{field.name.replace('_', '-')}"
        values, defaults = (as_tuple(getattr(each, field.name)) for each in (config, usual))
        if defaults and not values:
            raise ValueError(f"{option} needs at least one value.")
        for value in values:
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{option} must be a finite number, got {value}.")
            usually = any(isinstance(each, int | float) and each < 0 for each in defaults)
            if isinstance(value, int) and value < 0 and not usually:
                raise ValueError(f"{option} must not be negative, got {value}.")


def run_one(name: str, config: Any, place: Place) -> Path:
    """Run an experiment for one seed, here and now."""
    import torch

    folder = run_folder(name, config, place.runs)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if is_finished(name, config, folder):  # by another process, just now
            return folder
        resumed = (folder / "config.json").exists()
        write_json(folder / "config.json", identity(name, config))
        log = RunLog(
            folder,
            seed=config.seed,
            data_dir=place.data_dir,
            models=place.runs / "models",
            progress=place.progress,
        )
        log.say("resuming" if resumed else "starting")
        started = time.monotonic()
        with _traceback_in(folder / "error.txt"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            metrics = registry.load(name).run(config, log)
        done = {
            "metrics": metrics,
            "command": command(name, config),
            "duration": round(time.monotonic() - started, 1),
            # From scratch, also of what was there already.
            "cpu_seconds": round(log.cpu_seconds, 1),
            "resumed": resumed,
            # Then the duration is not that of everything.
            "reused": resumed or log.reused,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "version": registry.version(name),
            "commit": provenance.commit(),
            "environment": provenance.environment(),
        }
        write_json(folder / "done.json", sealed(done))
        log.say(f"done in {done['duration']:.0f} s")
    return folder


def is_finished(name: str, config: Any, folder: Path) -> bool:
    """Whether a run is done; a ValueError where its folder belongs to something else."""
    path = folder / "config.json"
    if path.exists() and read_json(path) != identity(name, config):
        raise ValueError(
            f"{folder} holds a run of another configuration; choose another --runs folder, or "
            "move it away."
        )
    return path.exists() and (folder / "done.json").exists()


@contextmanager
def _traceback_in(path: Path) -> Iterator[None]:
    """Keep what the command line shortens to a sentence."""
    path.unlink(missing_ok=True)
    try:
        yield
    except Exception:
        with suppress(OSError):  # A full disk may be what has gone wrong.
            path.write_text(traceback.format_exc(), encoding="utf-8")
        raise
