"""New runs in a record that there is: seeds join it one by one, and nothing is lost.

Seeds are averaged where they have the same configuration and version. A setting that came later had
its default before, so it makes no other configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zeromean.experiments import registry
from zeromean.experiments.runs import provenance
from zeromean.experiments.runs.finished_runs import (
    SIZES,
    Runs,
    best_first,
    by_digest,
    is_timing,
    rank_of,
    size_of,
)
from zeromean.experiments.runs.identity import digest_of
from zeromean.experiments.runs.json_files import plain
from zeromean.experiments.runs.provenance import UNKNOWN, fault
from zeromean.experiments.runs.record import command_of, record, redrawn, shown_of, words

Seeds = dict[int, dict[str, Any]]


def completed(name: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """A run with the settings that came after it, and the digest that it would have today.

    Of another version it stays as it is: a change of meaning may have been one of defaults.
    """
    if older(name, run):
        return dict(run)
    config = dict(run["config"])
    defaults = plain(dataclasses.asdict(registry.load(name).Config()))
    config |= {key: value for key, value in defaults.items() if key not in config}
    fields = {key: value for key, value in config.items() if key != "seed"}
    return {**run, "config": config, "digest": digest_of(fields)}


def adopted(name: str, before: Mapping[str, Any] | None) -> Runs:
    """The runs of a record; older ones have as much of their provenance as is known."""
    runs = []
    for run in before["runs"] if before else ():
        commit = str(run["environment"].get("commit") or UNKNOWN)
        lost = (
            "version" not in run
            and commit != UNKNOWN
            and provenance.commit_exists(commit.rstrip("+")) is False
        )
        known = {**run, "version": run.get("version", 1), **({"lost": True} if lost else {})}
        runs.append(completed(name, known))
    return runs


def believed_seeds(name: str, before: Mapping[str, Any] | None) -> dict[str, set[int]]:
    """The seeds of a record, by configuration, that new ones may join."""
    old = by_digest(adopted(name, before))
    return {digest: set(_believed(name, seeds)) for digest, seeds in old.items()}


def _believed(name: str, seeds: Seeds) -> Seeds:
    return {s: run for s, run in seeds.items() if not older(name, run) and not fault(run)}


def older(name: str, run: Mapping[str, Any]) -> str:
    """Why a run is not of today's version, in a clause; empty where it is."""
    was, today = run.get("version", 1), registry.version(name)
    if was == today:
        return ""
    return f"it is of version {was} of the experiment, which is at {today}; run it again"


def merged(
    before: dict[str, Any] | None,
    found: Runs,
    started: Mapping[str, Iterable[int]],
    name: str,
    path: Path,
    on_damage: Callable[[str], object],
) -> dict[str, Any]:
    """A record with new runs in it; what it no longer shows is among its tries.

    Args:
        started: Seeds that are not finished, by configuration.
    """
    after = record(name, sorted(found, key=best_first))
    old, new = by_digest(adopted(name, before)), by_digest(after["runs"])
    tries = list(before.get("tries", ())) if before else []
    best = min((rank_of(size_of(seeds)) for seeds in old.values()), default=len(SIZES))
    for digest, seeds in new.items():
        if size_of(seeds) == "smoke" and best < rank_of("smoke"):
            continue  # It shows that the machinery runs, and nothing else.
        if size_of(seeds) == "full":
            # Where another configuration was the full one, it is so no more.
            for other in [
                d for d, known in old.items() if d != digest and size_of(known) == "full"
            ]:
                earlier = old.pop(other)
                if _believed(name, earlier):
                    on_damage(_differs(path, earlier, seeds))
                tries.insert(0, _try(earlier))
        known = old.get(digest)
        if known is None:
            old[digest] = seeds
            continue
        good = _believed(name, known)
        if len(good) < len(known):
            tries.insert(0, _try(known))
        agree = all(_same(name, run, good[s]) for s, run in seeds.items() if s in good)
        if agree:
            old[digest] = {**seeds, **{s: _with_curves(run, seeds) for s, run in good.items()}}
        elif len(seeds) >= len(good):
            tries.insert(0, _try(good))
            old[digest] = seeds
        else:
            on_damage(
                f"{path} goes on to show its {len(good)} seeds; the {len(seeds)} of {digest} that "
                "are new and have other numbers stand among its tries."
            )
            tries.insert(0, _try(seeds))
            old[digest] = good
    runs = sorted((run for seeds in old.values() for run in seeds.values()), key=best_first)
    return {
        "name": name,
        **words(name, runs),
        "command": command_of(shown_of(runs)) or (before or after)["command"],
        "runs": runs,
        "tries": _without_repetitions(name, tries),
        **_drawn(name, before, after, shown_of(runs)),
        "started": _started(name, before, started, shown_of(runs)),
    }


def _with_curves(run: dict[str, Any], seeds: Seeds) -> dict[str, Any]:
    """A run of the record, which may be older than curves are."""
    new = seeds.get(run["seed"], {})
    return {**run, "curves": new["curves"]} if "curves" in new and "curves" not in run else run


def _drawn(
    name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any], shown: Runs
) -> dict[str, Any]:
    """The figures, and the seeds that they show: as many as there is something to draw from."""
    seeds = [run["seed"] for run in shown]
    figures = redrawn(name, shown)
    if figures is not None:
        return {"figures": figures, "drawn": seeds}
    if before is None or (after["drawn"] == seeds and after["runs"][0]["digest"] == _digest(shown)):
        return {key: after[key] for key in ("figures", "drawn")}
    drawn = before.get("drawn") or [run["seed"] for run in shown_of(before["runs"])]
    return {"figures": before["figures"], "drawn": drawn}


def _digest(shown: Runs) -> str | None:
    return shown[0]["digest"] if shown else None


def _started(
    name: str,
    before: Mapping[str, Any] | None,
    started: Mapping[str, Iterable[int]],
    shown: Runs,
) -> list[int]:
    """Seeds of what is shown that were started, here or earlier, and have no result yet."""
    digest = _digest(shown)
    known = adopted(name, before)
    earlier = before["started"] if before and known and "started" in before else ()
    if earlier and shown_of(known)[0]["digest"] != digest:
        earlier = ()
    return sorted({*earlier, *started.get(digest or "", ())} - {run["seed"] for run in shown})


def _differs(path: Path, earlier: Seeds, seeds: Seeds) -> str:
    """A sentence about two configurations, each of which was the full one once."""
    was, now = (next(iter(each.values()))["config"] for each in (earlier, seeds))
    settings = ", ".join(
        f"{key} = {was.get(key, 'nothing')} where that of today has {now.get(key, 'nothing')}"
        for key in dict.fromkeys((*now, *was))
        if key != "seed" and was.get(key) != now.get(key)
    )
    return (
        f"{path}: {_in_words(earlier)} of another configuration, {settings}; not averaged with "
        f"{_in_words(seeds)}, but kept among the tries."
    )


def _in_words(seeds: Iterable[int]) -> str:
    numbers = [str(seed) for seed in seeds]
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _try(seeds: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Runs that are shown no longer; they are drawn no longer either."""
    runs = [{k: v for k, v in run.items() if k != "curves"} for run in seeds.values()]
    return {"command": command_of(runs), "runs": runs}


def _without_repetitions(name: str, tries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in tries:
        kept.setdefault(tuple(result_of(name, run) for run in each["runs"]), each)
    return list(kept.values())


def _same(name: str, run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return result_of(name, run) == result_of(name, other)


def result_of(name: str, run: Mapping[str, Any]) -> str:
    """What makes two runs the same: configuration, seed, version and numbers, but for times."""
    metrics = {key: value for key, value in run["metrics"].items() if not is_timing(name, key)}
    digest = completed(name, run)["digest"]
    return digest_of([digest, run["seed"], run.get("version", 1), metrics])
