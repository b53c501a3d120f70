"""What a run is: its configuration, the folder and the command line that belong to it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from zeromean.experiments import registry
from zeromean.experiments.runs.json_files import plain


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


def identity(name: str, config: Any) -> dict[str, Any]:
    """What config.json holds: two runs are the same where this is."""
    return {"experiment": name, "config": plain(dataclasses.asdict(config))}


def as_tuple(value: Any) -> tuple:
    """The values of a setting, which has one or several."""
    return value if isinstance(value, tuple) else (value,)


def _option(key: str, value: Any) -> str:
    flag = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return " ".join([f"--{flag}", *(shlex.quote(str(each)) for each in as_tuple(value))])
