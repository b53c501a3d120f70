"""Small records of finished runs: one JSON file an experiment, to be committed and reported.

A record has the runs that are shown, and the tries: what was shown before, at full size, and is no
longer. A new run replaces nothing, and seeds join one by one. `curves` of a run is what figures are
drawn from (`curves.py`), `drawn` the seeds that they show, `started` the seeds that were begun and
have no result yet. `checksum` is that of everything else in the file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from zeromean.experiments import registry
from zeromean.experiments.runs.checksum import is_changed, sealed
from zeromean.experiments.runs.damage import damage_of, refuse
from zeromean.experiments.runs.finished_runs import (
    SIZES,
    UNFINISHED,
    Runs,
    best_first,
    by_digest,
    done_files,
    flat,
    list_unfinished,
    read_finished,
    read_run,
    size_in_command,
)
from zeromean.experiments.runs.identity import digest_of
from zeromean.experiments.runs.json_files import read_json, replace_text, to_json
from zeromean.experiments.runs.merging import believed_seeds, completed, merged, older, result_of
from zeromean.experiments.runs.provenance import fault, missing_seed
from zeromean.experiments.runs.record import record

__all__ = ["collect", "flat", "record_of", "status", "with_own_runs"]


def _complain(sentence: str) -> None:
    print(f"zeromean: {sentence}", file=sys.stderr)


def collect(
    runs: Path, results: Path, on_damage: Callable[[str], object] = _complain
) -> list[Path]:
    """Write `results`/NAME.json for every experiment that has finished runs in `runs`.

    What a record has already and `runs` has not stays in it, with the words and claims of today.
    Runs without their provenance, records that were changed by hand and files that cannot be read
    are refused; the others are collected all the same.

    Args:
        on_damage: Called with a sentence for everything that is refused.
    """
    paths = []
    for name in registry.REGISTRY:
        path = results / f"{name}.json"
        with damage_of(path, on_damage):
            before = _read(path, name)
            with damage_of(runs / name, on_damage):
                known = believed_seeds(name, before)
                found, started = _believed(name, runs, known, on_damage)
                content = sealed(merged(before, found, started, name, path, on_damage))
                if content["runs"] and content != before:
                    results.mkdir(parents=True, exist_ok=True)
                    replace_text(path, _with_short_lists(to_json(content, indent=1)) + "\n")
                    paths.append(path)
    return paths


def record_of(name: str, runs: Path, on_damage: Callable[[str], object] = refuse) -> dict[str, Any]:
    """Everything the report needs to know about an experiment's runs in a folder.

    `runs` has every finished run, the best size first; `figures` shows the runs of the first
    configuration alone. Lists are left out of the metrics: they are what the figures show.
    """
    return record(name, sorted(read_finished(name, runs, on_damage), key=best_first))


def with_own_runs(
    results: Path | None,
    runs: Path | None,
    on_damage: Callable[[str], object] = _complain,
    *,
    only: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """The records of a folder, with the runs of another next to theirs.

    Nothing is written. Finished runs that a record has not are marked as own: they stand next to
    what it shows, and replace nothing. Those that are not finished are named in `unfinished`.

    Args:
        only: The experiments; default: all.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in only or registry.REGISTRY:
        path = results / f"{name}.json" if results else None
        before: dict[str, Any] | None = None
        after: dict[str, Any] = {"runs": []}
        unfinished: list[str] = []
        known: set[str] = set()
        if path and path.exists():
            with damage_of(path, on_damage):
                content = read_json(path, "runs")
                known = {result_of(name, run) for run in content["runs"]}
                before = content
        if runs:
            with damage_of(runs / name, on_damage):
                unfinished = list_unfinished(name, runs)
                after = record_of(name, runs, on_damage)
        own = [{**run, "own": True} for run in after["runs"] if result_of(name, run) not in known]
        if before is not None:
            both = {**before, "runs": [*before["runs"], *own], "unfinished": unfinished}
            # What was not changed by hand is not so with what stands next to it.
            found[name] = both if is_changed(before) or "checksum" not in before else sealed(both)
        elif own or unfinished:
            empty = {**record(name, []), "command": f"zeromean run {name}"}
            found[name] = {**(after if own else empty), "runs": own, "unfinished": unfinished}
    return found


def status(name: str, runs: Path, on_damage: Callable[[str], object] = refuse) -> str:
    """How many runs of which size are finished, and how many are not, in words."""
    sizes = []
    for path in done_files(name, runs):
        with damage_of(path, on_damage):
            sizes.append(size_in_command(read_run(path, name)["command"]))
    sizes += [each.split(": ")[-1] for each in list_unfinished(name, runs)]
    counts = {size: sizes.count(size) for size in (*SIZES, *UNFINISHED) if size in sizes}
    return ", ".join(f"{count} {size}" for size, count in counts.items()) or "not run"


def _read(path: Path, name: str) -> dict[str, Any] | None:
    """A record that is to be added to; a ValueError where it is damaged or was changed by hand."""
    if not path.exists():
        return None
    record = read_json(path, "runs", "command", "figures", remedy="delete it")
    if is_changed(record):
        raise ValueError(
            f"{path} was changed by hand: its checksum is that of something else; take it back "
            "from git, or delete it and collect the runs again."
        )
    known = {"size", "digest", "seed", "metrics", "config", "environment"}
    for run in [
        *record["runs"],
        *(run for each in record.get("tries", ()) for run in each["runs"]),
    ]:
        if not (isinstance(run, dict) and known <= run.keys()):
            raise ValueError(
                f"{path} is damaged (a run lacks one of {', '.join(sorted(known))}); delete it."
            )
        if "version" in run and "checksum" not in record:
            raise ValueError(f"{path} was changed by hand: it lacks its checksum; delete it.")
    if record.get("name", name) != name:
        raise ValueError(f"{path} is the record of {record['name']}; give it that name.")
    for run in record["runs"]:
        fields = {key: value for key, value in run["config"].items() if key != "seed"}
        if digest_of(fields) != run["digest"]:
            raise ValueError(
                f"{path} was changed by hand: the configuration of seed {run['seed']} is not that "
                f"of {run['digest']}; delete it."
            )
    return record


def _believed(
    name: str,
    runs: Path,
    known: Mapping[str, Collection[int]],
    on_damage: Callable[[str], object],
) -> tuple[Runs, dict[str, list[int]]]:
    """The finished runs of a folder, by configurations whose every seed has its provenance.

    And the seeds that were started after the last of these, by configuration. `known` are the seeds
    that a record has, which are not missing.
    """
    believed: Runs = []
    started: dict[str, list[int]] = {}
    for digest, seeds in by_digest(read_finished(name, runs, on_damage)).items():
        folder = runs / name / digest
        begun = {int(each.name.removeprefix("seed-")) for each in folder.glob("seed-*")}
        digest_today = completed(name, next(iter(seeds.values())))["digest"]
        clause = next((f"seed {s}: {why}" for s, run in seeds.items() if (why := fault(run))), "")
        clause = clause or next(
            (f"seed {s}: {why}" for s, run in seeds.items() if (why := older(name, run))), ""
        )
        missing = missing_seed({*seeds, *known.get(digest_today, ())}, begun - seeds.keys())
        if not clause and missing is not None:
            clause = f"seed {missing} is missing; run it too"
        if clause:
            on_damage(f"{folder} is not collected, {clause}.")
            continue
        believed += [completed(name, run) for run in seeds.values()]
        started.setdefault(digest_today, []).extend(begun - seeds.keys())
    return believed, started


def _with_short_lists(text: str) -> str:
    """JSON with a line for every list of numbers or words, not for every one of them."""
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: _on_one_line(match[1]), text)


def _on_one_line(items: str) -> str:
    return "[" + ", ".join(re.split(r",\n\s*", items)) + "]"
