"""The content of one record: what it says of some runs, in the words of today."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeromean.experiments import registry
from zeromean.experiments.runs import curves
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.finished_runs import Runs, flat, with_nan
from zeromean.experiments.runs.json_files import plain


def record(name: str, runs: Runs) -> dict[str, Any]:
    """A record of runs as their folders have them, the first configuration of which is shown."""
    experiment = registry.load(name)
    shown = shown_of(runs)
    claimed = {metric for claim in experiment.CLAIMS for metric in claim.metrics}
    kept = []
    for run in runs:
        short = {**run, "metrics": flat(run["metrics"], claimed)}
        # Another seed may join those that are shown, unless one is all there is.
        if run in shown and not is_deterministic(name):
            short["curves"] = curves.pack(run["metrics"])
        kept.append(short)
    return {
        "name": name,
        **words(name, kept),
        "command": command_of(shown),
        "runs": kept,
        "tries": [],
        "figures": _figures(name, shown),
        "drawn": [run["seed"] for run in shown],
        "started": [],
    }


def shown_of(runs: Runs) -> Runs:
    """The runs of the first configuration."""
    return [run for run in runs if run["digest"] == runs[0]["digest"]]


def is_deterministic(name: str) -> bool:
    """Whether nothing in an experiment is random."""
    return getattr(registry.load(name), "DETERMINISTIC", False)


def redrawn(name: str, shown: Runs) -> list[dict[str, Any]] | None:
    """The figures of runs in a record; None where one of them lacks its curves."""
    if not shown or any("curves" not in run for run in shown):
        return None
    return _figures(name, [{**run, "metrics": curves.unpack(run["curves"])} for run in shown])


def _figures(name: str, shown: Runs) -> list[dict[str, Any]]:
    numbers = [{**run, "metrics": with_nan(run["metrics"])} for run in shown]
    # What was not finite in a metric is not in a figure either: JSON has no word for it.
    return plain(registry.load(name).figures(numbers)) if shown else []


def words(name: str, runs: Runs) -> dict[str, Any]:
    """What a record says besides the numbers of its runs."""
    experiment = registry.load(name)
    measured = {key for run in runs for key in run["metrics"]}
    return {
        "title": experiment.TITLE,
        "source": experiment.SOURCE,
        "version": registry.version(name),
        "deterministic": is_deterministic(name),
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


def command_of(runs: Sequence[dict[str, Any]]) -> str:
    """The command that makes all of these runs, which differ by their seeds alone."""
    if not runs or "command" not in runs[0]:
        return ""
    start, _, _ = runs[0]["command"].rpartition(" --seeds ")
    return " ".join([start, "--seeds", *(str(run["seed"]) for run in runs)])
