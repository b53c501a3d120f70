"""Where a number comes from: what a run must say of itself before a record believes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeromean.experiments.runs import runner

UNKNOWN = "unknown"
# Without these the versions and the machine are not known.
ENVIRONMENT = ("python", "torch", "numpy", "platform", "processor", "threads")


def fault(run: Mapping[str, Any]) -> str:
    """Why a run of a record is not to be believed, in a clause; empty where it is."""
    commit = str(run["environment"].get("commit") or UNKNOWN)
    if commit == UNKNOWN:
        return "it has no commit"
    if commit.endswith("+"):
        return f"it was made with changed files (commit {commit[:8]}+); commit them and run again"
    if runner.commit_exists(commit) is False:
        return f"this repository has no commit {commit[:8]}"
    if not run.get("command"):
        return "it has no command"
    missing = [key for key in ENVIRONMENT if key not in run["environment"]]
    if missing:
        return f"its environment lacks {', '.join(missing)}"
    if run.get("cpu_seconds") is None:
        return "it has no CPU time from scratch; run it again with this version"
    fields = {key: value for key, value in run["config"].items() if key != "seed"}
    if runner.digest_of(fields) != run["digest"]:
        return f"its configuration is not that of {run['digest']}"
    return ""


def missing_seed(seeds: Sequence[int], unfinished: Sequence[int] = ()) -> int | None:
    """The first seed that is left out: between two others, or started and not finished."""
    everything = range(min(seeds), max(seeds) + 1)
    left_out = sorted({*(set(everything) - set(seeds)), *unfinished})
    return left_out[0] if left_out else None
