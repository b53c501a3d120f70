"""Small records of finished runs: one JSON file an experiment, to be committed and reported.

A record has the runs that are shown, and the tries: what was shown before, at full size, and is no
longer. A new run replaces nothing. `checksum` is that of everything else in the file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from zeromean.experiments import registry
from zeromean.experiments.runs import provenance
from zeromean.experiments.runs.checksum import is_changed, sealed
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.damage import damage_of, refuse
from zeromean.experiments.runs.finished_runs import (
    SIZES,
    UNFINISHED,
    Runs,
    best_first,
    by_digest,
    done_files,
    flat,
    is_timing,
    list_unfinished,
    rank_of,
    read_finished,
    read_run,
    size_in_command,
    size_of,
    with_nan,
)
from zeromean.experiments.runs.identity import digest_of
from zeromean.experiments.runs.json_files import plain, read_json, replace_text, to_json
from zeromean.experiments.runs.provenance import UNKNOWN, fault, missing_seed


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
                found = _believed(name, runs, on_damage)
                record = sealed(_merged(before, found, name, path, on_damage))
                if record["runs"] and record != before:
                    results.mkdir(parents=True, exist_ok=True)
                    replace_text(path, _with_short_lists(to_json(record, indent=1)) + "\n")
                    paths.append(path)
    return paths


def record_of(name: str, runs: Path, on_damage: Callable[[str], object] = refuse) -> dict[str, Any]:
    """Everything the report needs to know about an experiment's runs in a folder.

    `runs` has every finished run, the best size first; `figures` shows the runs of the first
    configuration alone. Lists are left out of the metrics: they are what the figures show.
    """
    return _record(name, sorted(read_finished(name, runs, on_damage), key=best_first))


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
                record = read_json(path, "runs")
                known = {_result(name, run) for run in record["runs"]}
                before = record
        if runs:
            with damage_of(runs / name, on_damage):
                unfinished = list_unfinished(name, runs)
                after = record_of(name, runs, on_damage)
        own = [{**run, "own": True} for run in after["runs"] if _result(name, run) not in known]
        if before is not None:
            both = {**before, "runs": [*before["runs"], *own], "unfinished": unfinished}
            # What was not changed by hand is not so with what stands next to it.
            found[name] = both if is_changed(before) or "checksum" not in before else sealed(both)
        elif own or unfinished:
            empty = {**_record(name, []), "command": f"zeromean run {name}"}
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


def _record(name: str, runs: Runs) -> dict[str, Any]:
    """A record of runs that still have their lists."""
    experiment = registry.load(name)
    shown = [run for run in runs if run["digest"] == runs[0]["digest"]]
    numbers = [{**run, "metrics": with_nan(run["metrics"])} for run in shown]
    # What was not finite in a metric is not in a figure either: JSON has no word for it.
    figures = plain(experiment.figures(numbers)) if shown else []
    claimed = {metric for claim in experiment.CLAIMS for metric in claim.metrics}
    runs = [{**run, "metrics": flat(run["metrics"], claimed)} for run in runs]
    return {
        "name": name,
        **_words(name, runs),
        "command": _command(shown),
        "runs": runs,
        "tries": [],
        "figures": figures,
    }


def _words(name: str, runs: Runs) -> dict[str, Any]:
    """What a record says besides the numbers of its runs: as the code says it today."""
    experiment = registry.load(name)
    measured = {key for run in runs for key in run["metrics"]}
    return {
        "title": experiment.TITLE,
        "source": experiment.SOURCE,
        "version": registry.version(name),
        "deterministic": getattr(experiment, "DETERMINISTIC", False),
        "claims": [
            _claim(claim) for claim in experiment.CLAIMS if measured.issuperset(claim.metrics)
        ],
        # What was checked where ours is not as the document's.
        "notes": "\n\n".join(getattr(experiment, "NOTES", ())),
    }


def _claim(claim: Claim) -> dict[str, Any]:
    return {
        "metric": claim.metric,
        "label": claim.label,
        "value": claim.value,
        "tolerance": claim.tolerance,
        "direction": claim.direction,
        "unit": claim.unit,
        "author": claim.author.key,
        "source": str(claim.author),
        **({"statistic": claim.statistic} if claim.statistic != "mean" else {}),
        **({"seeds_in_run": claim.seeds_in_run} if claim.seeds_in_run else {}),
    }


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


def _believed(name: str, runs: Path, on_damage: Callable[[str], object]) -> Runs:
    """The finished runs of a folder, by configurations whose every seed has its provenance."""
    found = by_digest(read_finished(name, runs, on_damage))
    for digest, seeds in list(found.items()):
        folder = runs / name / digest
        started = {int(each.name.removeprefix("seed-")) for each in folder.glob("seed-*")}
        clause = next((f"seed {s}: {why}" for s, run in seeds.items() if (why := fault(run))), "")
        missing = missing_seed(list(seeds), sorted(started - seeds.keys()))
        if not clause and missing is not None:
            clause = f"seed {missing} is missing; run it too"
        if clause:
            on_damage(f"{folder} is not collected, {clause}.")
            del found[digest]
    return [run for seeds in found.values() for run in seeds.values()]


def _merged(
    before: dict[str, Any] | None,
    found: Runs,
    name: str,
    path: Path,
    on_damage: Callable[[str], object],
) -> dict[str, Any]:
    """A record with new runs in it; what it no longer shows is among its tries."""
    after = _record(name, sorted(found, key=best_first))
    if before is None:
        return after
    old, new = by_digest(_adopted(before)), by_digest(after["runs"])
    tries = list(before.get("tries", ()))
    today = registry.version(name)
    best = min((rank_of(size_of(seeds)) for seeds in old.values()), default=len(SIZES))
    for digest, seeds in new.items():
        if size_of(seeds) == "smoke" and best < rank_of("smoke"):
            continue  # It shows that the machinery runs, and nothing else.
        if size_of(seeds) == "full":
            # Where another configuration was the full one, it is so no more.
            for other in [
                d for d, known in old.items() if d != digest and size_of(known) == "full"
            ]:
                tries.insert(0, _try(old.pop(other)))
        known = old.get(digest)
        if known is None:
            old[digest] = seeds
            continue
        agree = all(
            _result(name, run) == _result(name, known[s]) for s, run in seeds.items() if s in known
        )
        good = all(run.get("version", 1) == today and not fault(run) for run in known.values())
        if agree and good:
            old[digest] = {**seeds, **known}
        elif len(seeds) >= len(known) or any(r.get("version", 1) < today for r in known.values()):
            tries.insert(0, _try(known))
            old[digest] = seeds
        else:
            on_damage(
                f"{path} goes on to show its {len(known)} seeds; the {len(seeds)} of {digest} that "
                "are new stand among its tries."
            )
            tries.insert(0, _try(seeds))
    merged = sorted((run for seeds in old.values() for run in seeds.values()), key=best_first)
    shown = [run for run in merged if run["digest"] == merged[0]["digest"]] if merged else []
    drawn = {run["seed"] for run in after["runs"] if shown and run["digest"] == shown[0]["digest"]}
    redrawn = bool(shown) and drawn == {run["seed"] for run in shown}
    return {
        "name": name,
        **_words(name, merged),
        "command": _command(shown) or before["command"],
        "runs": merged,
        "tries": _without_repetitions(name, tries),
        "figures": after["figures"] if redrawn else before["figures"],
    }


def _adopted(record: dict[str, Any]) -> Runs:
    """The runs of a record; older ones have as much of their provenance as is known."""
    adopted = []
    for run in record["runs"]:
        commit = str(run["environment"].get("commit") or UNKNOWN)
        lost = (
            "version" not in run
            and commit != UNKNOWN
            and provenance.commit_exists(commit.rstrip("+")) is False
        )
        adopted.append(
            {**run, "version": run.get("version", 1), **({"lost": True} if lost else {})}
        )
    return adopted


def _try(seeds: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    runs = list(seeds.values())
    return {"command": _command(runs), "runs": runs}


def _without_repetitions(name: str, tries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in tries:
        kept.setdefault(tuple(_result(name, run) for run in each["runs"]), each)
    return list(kept.values())


def _result(name: str, run: Mapping[str, Any]) -> str:
    """What makes two runs the same: configuration, seed, version and numbers, but for times."""
    metrics = {key: value for key, value in run["metrics"].items() if not is_timing(name, key)}
    return digest_of([run["digest"], run["seed"], run.get("version", 1), metrics])


def _with_short_lists(text: str) -> str:
    """JSON with a line for every list of numbers or words, not for every one of them."""
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: _on_one_line(match[1]), text)


def _on_one_line(items: str) -> str:
    return "[" + ", ".join(re.split(r",\n\s*", items)) + "]"


def _command(runs: Runs) -> str:
    """The command that makes all of these runs, which differ by their seeds alone."""
    if not runs or "command" not in runs[0]:
        return ""
    start, _, _ = runs[0]["command"].rpartition(" --seeds ")
    return " ".join([start, "--seeds", *(str(run["seed"]) for run in runs)])
