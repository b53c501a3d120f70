"""Runs as their folders hold them: finished ones with their numbers, and those that are not."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zeromean.experiments import registry
from zeromean.experiments.runs.checksum import is_changed
from zeromean.experiments.runs.damage import damage_of, require_numbers
from zeromean.experiments.runs.identity import digest, digest_of
from zeromean.experiments.runs.json_files import plain, read_json
from zeromean.experiments.runs.provenance import UNKNOWN
from zeromean.files.lock import is_locked

# The report shows the runs of one size, the best there is.
SIZES = ("full", "custom", "quick", "smoke")
# What has started and not ended: its process is alive, or not.
UNFINISHED = ("running", "interrupted")
Runs = list[dict[str, Any]]


def flat(
    metrics: Mapping[str, Any], claimed: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """The numbers by dotted name.

    None stands for what was not finite, or for nothing. Where there is a claim about it, it stays:
    seeds that have failed must not vanish among the others.
    """
    numbers: dict[str, Any] = {}
    for key, value in metrics.items():
        name = prefix + key
        if isinstance(value, Mapping):
            numbers |= flat(value, claimed, f"{name}.")
        elif isinstance(value, int | float) or (value is None and name in claimed):
            numbers[name] = value
    return numbers


def is_timing(name: str, metric: str) -> bool:
    """Whether a number is a time, which depends on the machine and on its load."""
    patterns: Sequence[str] = getattr(registry.load(name), "TIMINGS", ())
    return any(fnmatchcase(metric, pattern) for pattern in patterns)


def by_digest(runs: Iterable[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs by configuration and seed."""
    grouped: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        grouped.setdefault(run["digest"], {})[run["seed"]] = run
    return grouped


def size_of(runs: Mapping[int, dict[str, Any]]) -> str:
    """The size of one configuration's runs, by seed."""
    return next(iter(runs.values()))["size"]


def rank_of(size: str) -> int:
    """How good a size is: 0 is the best."""
    return SIZES.index(size) if size in SIZES else len(SIZES)


def read_finished(
    name: str, runs: Path, on_damage: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """Every finished run of an experiment in a folder, with the size that it has today."""
    experiment = registry.load(name)
    sizes = {
        digest(experiment.SMOKE): "smoke",
        digest(experiment.QUICK): "quick",
        digest(experiment.Config()): "full",
    }
    for path in done_files(name, runs):
        run = None
        with damage_of(path, on_damage):
            run = _run_at(path, name, experiment, sizes)
        if run is not None:
            yield run


def done_files(name: str, runs: Path) -> list[Path]:
    """The file with the numbers of every finished run."""
    return sorted((runs / name).glob("*/seed-*/done.json"))


def size_in_command(command: str) -> str:
    """The size that a command asks for, for which its experiment is not imported."""
    options = command.partition(" --seeds ")[0].split()[3:]
    return {(): "full", ("--quick",): "quick", ("--smoke",): "smoke"}.get(tuple(options), "custom")


def list_unfinished(name: str, runs: Path) -> list[str]:
    """Runs that have started and have no result: where, and which of UNFINISHED."""
    states = []
    for path in sorted((runs / name).glob("*/seed-*/config.json")):
        if not path.with_name("done.json").exists():
            state = "running" if is_locked(path.parent) else "interrupted"
            states.append(f"{path.parent}: {state}")
    return states


def read_run(path: Path, name: str) -> dict[str, Any]:
    """What config.json and done.json say of a run, if they are believed."""
    identity = read_json(path.with_name("config.json"), "config")
    if identity.get("experiment", name) != name:
        raise ValueError(
            f"{path.with_name('config.json')} holds a run of {identity['experiment']}; "
            "move it away."
        )
    done = read_json(path, "command", "duration", "environment", "commit", "metrics")
    if is_changed(done):
        raise ValueError(
            f"{path} was changed by hand: its checksum is that of something else; move its "
            "folder away, and run it again."
        )
    require_numbers(flat(done["metrics"]))
    seed = operator.index(identity["config"]["seed"])
    if path.parent.name != f"seed-{seed}":
        raise ValueError(
            f"{path.with_name('config.json')} is that of seed {seed}; its folder must say so."
        )
    return {
        "digest": path.parent.parent.name,
        "size": "",  # Which it is today, and the version, only its experiment knows.
        "version": done.get("version"),
        "config": identity["config"],
        "seed": seed,
        "command": str(done["command"]),
        "seconds": float(done["duration"]),
        "cpu_seconds": done.get("cpu_seconds"),
        "from_scratch": not done.get("reused", done.get("resumed", False)),
        "environment": {**done["environment"], "commit": done["commit"] or UNKNOWN},
        "metrics": done["metrics"],
    }


def _run_at(
    path: Path, name: str, experiment: registry.Experiment, sizes: Mapping[str, str]
) -> dict[str, Any]:
    run = read_run(path, name)
    size = sizes.get(_digest_today(experiment, run["config"]), "custom")
    return {**run, "size": size, "version": _version(run, name)}


def with_nan(value: Any) -> Any:
    """Metrics for figures, which calculate with them: null stands for what was not finite."""
    if isinstance(value, Mapping):
        return {key: with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    return math.nan if value is None else value


def _version(run: Mapping[str, Any], name: str) -> int:
    # Runs have had their CPU time since experiments train on 55,000 images, and their version a
    # little later.
    first = 1 if run["cpu_seconds"] is None else registry.version(name)
    return first if run["version"] is None else run["version"]


def _digest_today(experiment: registry.Experiment, config: Mapping[str, Any]) -> str:
    """The digest of a run's configuration; fields that came later had their defaults then."""
    fields = {**plain(dataclasses.asdict(experiment.Config())), **config}
    fields.pop("seed")
    return digest_of(fields)


def best_first(run: dict[str, Any]) -> tuple[int, str, int]:
    """Sorts runs: the best size first, then by configuration and seed."""
    return rank_of(run["size"]), run["digest"], run["seed"]
