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
import hashlib
import json
import math
import multiprocessing
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from zeromean.experiments import registry
from zeromean.experiments.runs.checksum import sealed
from zeromean.experiments.runs.log import RunLog, plain, write_json
from zeromean.files.lock import locked

# What experiments, data sets and training raise for what the user can mend, in a sentence.
MENDABLE = (ValueError, OSError, ImportError)
PACKAGES = ("zeromean", "torch", "numpy", "lightning", "scikit-learn")


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
        from zeromean.training.serving import led_by_the_first

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
        _run_in_processes(name, pending, place, jobs)
    return folders


def _require_sensible(config: Any, usual: Any) -> None:
    """Refuse what no option can mean, before anything is trained."""
    for field in dataclasses.fields(config):
        option = f"--{field.name.replace('_', '-')}"
        values, defaults = (_as_tuple(getattr(each, field.name)) for each in (config, usual))
        if defaults and not values:
            raise ValueError(f"{option} needs at least one value.")
        for value in values:
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{option} must be a finite number, got {value}.")
            usually = any(isinstance(each, int | float) and each < 0 for each in defaults)
            if isinstance(value, int) and value < 0 and not usually:
                raise ValueError(f"{option} must not be negative, got {value}.")


def _as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def run_one(name: str, config: Any, place: Place) -> Path:
    """Run an experiment for one seed, here and now."""
    import torch

    folder = run_folder(name, config, place.runs)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if is_finished(name, config, folder):  # by another process, just now
            return folder
        resumed = (folder / "config.json").exists()
        write_json(folder / "config.json", _identity(name, config))
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
            "commit": commit(),
            "environment": environment(),
        }
        write_json(folder / "done.json", sealed(done))
        log.say(f"done in {done['duration']:.0f} s")
    return folder


def run_folder(name: str, config: Any, runs: Path) -> Path:
    return runs / name / digest(config) / f"seed-{config.seed}"


def digest(config: Any) -> str:
    """Ten hexadecimal digits that stand for everything in a configuration but its seed."""
    fields = dataclasses.asdict(config)
    fields.pop("seed", None)
    return digest_of(fields)


def digest_of(value: Any) -> str:
    text = json.dumps(plain(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def is_finished(name: str, config: Any, folder: Path) -> bool:
    """Whether a run is done; a ValueError where its folder belongs to something else."""
    identity = folder / "config.json"
    if identity.exists() and read_json(identity) != _identity(name, config):
        raise ValueError(
            f"{folder} holds a run of another configuration; choose another --runs folder, or "
            "move it away."
        )
    return identity.exists() and (folder / "done.json").exists()


def read_json(path: Path, *keys: str, remedy: str = "move its folder away") -> dict[str, Any]:
    """An object that has these keys."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {remedy}.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {remedy}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged (it holds no object); {remedy}.")
    missing = sorted(set(keys) - value.keys())
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}, of another version perhaps; {remedy}."
        )
    return value


def command(name: str, config: Any) -> str:
    """The command line that makes this run."""
    experiment = registry.load(name)
    sizes = {"": experiment.Config(), " --quick": experiment.QUICK, " --smoke": experiment.SMOKE}

    def changes(size: str) -> dict[str, Any]:
        return {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if field.name != "seed"
            and getattr(config, field.name) != getattr(sizes[size], field.name)
        }

    size = min(sizes, key=lambda size: len(changes(size)))
    options = "".join(f" {_option(key, value)}" for key, value in changes(size).items())
    return f"zeromean run {name}{size}{options} --seeds {config.seed}"


def environment() -> dict[str, Any]:
    """What a number may depend on."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of the checkout that this package lives in, with a + where it was changed."""
    head, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", "src")
    if head is None or changed is None or head.returncode:
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def commit_exists(name: str) -> bool | None:
    """Whether the checkout that this package lives in has a commit; None where it cannot tell."""
    shallow = _git("rev-parse", "--is-shallow-repository")
    if shallow is None or shallow.returncode or shallow.stdout.strip() != "false":
        return None
    found = _git("cat-file", "-e", f"{name}^{{commit}}")
    return None if found is None else found.returncode == 0


def _git(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None


def _processor() -> str:
    """The model of the processor where the system says it, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _identity(name: str, config: Any) -> dict[str, Any]:
    return {"experiment": name, "config": plain(dataclasses.asdict(config))}


def _option(key: str, value: Any) -> str:
    flag = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return " ".join([f"--{flag}", *(shlex.quote(str(each)) for each in _as_tuple(value))])


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


def _run_in_processes(name: str, configs: list[Any], place: Place, jobs: int) -> None:
    # A fresh interpreter for each run: forking a process that has used torch's threads can hang.
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(configs))
    # Seeds and processes, by the connections over which they report.
    running: dict[Any, tuple[int, Any]] = {}
    failures: list[tuple[bool, str]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                receiver, sender = context.Pipe(duplex=False)
                config = waiting.pop()
                process = context.Process(
                    target=_child, args=(name, config, place, sender), daemon=True
                )
                with _one_thread(), _deaf_to_interrupts():
                    process.start()
                sender.close()
                running[receiver] = config.seed, process
            ready: list[Any] = wait(list(running))
            for receiver in ready:
                seed, process = running.pop(receiver)
                try:
                    failure = receiver.recv()
                except EOFError:
                    process.join()
                    failure = (
                        True,
                        f"The process of seed {seed} was ended from outside (code "
                        f"{process.exitcode}), for want of memory perhaps; run again to go on, "
                        "with fewer --jobs if need be.",
                    )
                process.join()
                if failure is not None:
                    failures.append(failure)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()
    if failures:
        text = "\n".join(dict.fromkeys(text for _, text in failures))
        raise (ValueError if all(mendable for mendable, _ in failures) else RuntimeError)(text)


def _child(name: str, config: Any, place: Place, sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    failure = None
    try:
        run_one(name, config, place)
    except MENDABLE as error:
        failure = (True, str(error))
    except Exception:
        failure = (False, traceback.format_exc())
    sender.send(failure)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its children, so they watch it. Nothing is lost."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let a child find OMP_NUM_THREADS=1 before it imports torch."""
    previous = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = previous


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let a child ignore Ctrl-C from its first moment: it is the parent that ends its children."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
