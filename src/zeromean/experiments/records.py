"""Small records of finished runs: one JSON file an experiment, to be committed and reported."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from zeromean import experiments
from zeromean.experiments import runner
from zeromean.experiments.run_log import plain, replace_text, to_json

# The report shows the runs of one size, the best there is.
SIZES = ("full", "custom", "quick", "smoke")


def collect(runs: Path, results: Path) -> list[Path]:
    """Write `results`/NAME.json for every experiment that has finished runs in `runs`.

    What a record has already and `runs` has not stays in it, with the words and claims of today.
    """
    paths = []
    for name in experiments.REGISTRY:
        path = results / f"{name}.json"
        before, record = _read(path), record_of(name, runs)
        if before is not None:
            record = _merged(before, record, path)
        if record["runs"] and record != before:
            results.mkdir(parents=True, exist_ok=True)
            replace_text(path, _with_short_lists(to_json(record, indent=1)) + "\n")
            paths.append(path)
    return paths


def record_of(name: str, runs: Path) -> dict[str, Any]:
    """Everything the report needs to know about an experiment.

    `runs` has every finished run, the best size first; `figures` shows the runs of the first
    configuration alone. Lists are left out of the metrics: they are what the figures show.
    """
    experiment = experiments.load(name)
    finished = sorted(_finished(name, runs), key=_order)
    shown = [run for run in finished if run["digest"] == finished[0]["digest"]]
    figures = experiment.figures(shown) if shown else []
    claimed = {claim.metric for claim in experiment.CLAIMS}
    for run in finished:
        run["metrics"] = flat(run["metrics"], claimed)
    words = _words(experiment, finished)
    return {
        "name": name,
        "title": words["title"],
        "source": words["source"],
        "command": _command(shown),
        "runs": finished,
        "claims": words["claims"],
        "figures": figures,
        "notes": words["notes"],
    }


def _words(experiment: experiments.Experiment, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What a record says beside the numbers of its runs."""
    measured = {key for run in runs for key in run["metrics"]}
    return {
        "title": experiment.TITLE,
        "source": experiment.SOURCE,
        "claims": [
            {
                "metric": claim.metric,
                "label": claim.label,
                "paper": claim.paper_value,
                "tolerance": claim.tolerance,
                "direction": claim.direction,
                "unit": claim.unit,
                "source": claim.source,
            }
            for claim in experiment.CLAIMS
            if claim.metric in measured
        ],
        # What was checked where ours is not as the paper's.
        "notes": "\n\n".join(getattr(experiment, "NOTES", ())),
    }


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


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    record = runner.read_json(path, "runs", remedy="delete it")
    known = {"size", "digest", "seed", "metrics"}
    if not all(isinstance(run, dict) and known <= run.keys() for run in record["runs"]):
        raise ValueError(
            f"{path} is damaged (a run lacks one of {', '.join(sorted(known))}); delete it."
        )
    return record


def _merged(before: dict[str, Any], after: dict[str, Any], path: Path) -> dict[str, Any]:
    """A record with new runs in it, and those of its old ones that they do not replace."""
    old, new = _by_digest(before["runs"]), _by_digest(after["runs"])
    best = min((_rank(_size(known)) for known in old.values()), default=len(SIZES))
    for digest, found in list(new.items()):
        missing = sorted(old.get(digest, {}).keys() - found.keys())
        if missing:
            seeds = ", ".join(map(str, missing))
            print(f"{path} keeps its runs: it has seeds {seeds} too.", file=sys.stderr)
        # A quick try has no place beside the real thing.
        if missing or (_size(found) in ("quick", "smoke") and best < _rank(_size(found))):
            del new[digest]
    if any(_size(found) == "full" for found in new.values()):
        # Where another configuration was the full one, it is so no more.
        old = {digest: known for digest, known in old.items() if _size(known) != "full"}
    merged = [run for found in (old | new).values() for run in found.values()]
    merged.sort(key=_order)
    shows_new = merged[0]["digest"] in new
    words = _words(experiments.load(after["name"]), merged)
    return {
        "name": after["name"],
        "title": words["title"],
        "source": words["source"],
        "command": after["command"] if shows_new else before["command"],
        "runs": merged,
        "claims": words["claims"],
        "figures": after["figures"] if shows_new else before["figures"],
        "notes": words["notes"],
    }


def _by_digest(runs: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs by configuration and seed."""
    grouped: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        grouped.setdefault(run["digest"], {})[run["seed"]] = run
    return grouped


def _size(runs: dict[int, dict[str, Any]]) -> str:
    return next(iter(runs.values()))["size"]


def _rank(size: str) -> int:
    return SIZES.index(size) if size in SIZES else len(SIZES)


def status(name: str, runs: Path) -> str:
    """How many runs of which size are finished, in words."""
    sizes = [run["size"] for run in _finished(name, runs)]
    counts = {size: sizes.count(size) for size in SIZES if size in sizes}
    return ", ".join(f"{count} {size}" for size, count in counts.items()) or "not run"


def _finished(name: str, runs: Path) -> Iterator[dict[str, Any]]:
    experiment = experiments.load(name)
    sizes = {
        runner.digest(experiment.SMOKE): "smoke",
        runner.digest(experiment.QUICK): "quick",
        runner.digest(experiment.Config()): "full",
    }
    for path in sorted((runs / name).glob("*/seed-*/done.json")):
        identity = runner.read_json(path.with_name("config.json"), "config")
        digest = path.parent.parent.name
        done = runner.read_json(path, "command", "duration", "environment", "commit", "metrics")
        yield {
            "digest": digest,
            "size": sizes.get(_digest_today(experiment, identity["config"]), "custom"),
            "config": identity["config"],
            "seed": identity["config"]["seed"],
            "command": done["command"],
            "seconds": done["duration"],
            "from_scratch": not done.get("reused", done.get("resumed", False)),
            "environment": {**done["environment"], "commit": done["commit"] or "unknown"},
            "metrics": done["metrics"],
        }


def _digest_today(experiment: experiments.Experiment, config: Mapping[str, Any]) -> str:
    """The digest of a run's configuration; fields that came later had their defaults then."""
    fields = {**plain(dataclasses.asdict(experiment.Config())), **config}
    fields.pop("seed")
    return runner.digest_of(fields)


def _with_short_lists(text: str) -> str:
    """JSON with a line for every list of numbers or words, not for every one of them."""
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: _on_one_line(match[1]), text)


def _on_one_line(items: str) -> str:
    return "[" + ", ".join(re.split(r",\n\s*", items)) + "]"


def _order(run: dict[str, Any]) -> tuple[int, str, int]:
    return SIZES.index(run["size"]), run["digest"], run["seed"]


def _command(runs: list[dict[str, Any]]) -> str:
    """The command that makes all of these runs, which differ by their seeds alone."""
    if not runs:
        return ""
    start, _, _ = runs[0]["command"].rpartition(" --seeds ")
    return " ".join([start, "--seeds", *(str(run["seed"]) for run in runs)])
