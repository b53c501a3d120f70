"""Where a number comes from: what a run says of itself, and must say before it is believed."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from zeromean.experiments.runs.identity import digest_of

UNKNOWN = "unknown"
PACKAGES = ("zeromean", "torch", "numpy", "lightning", "scikit-learn")
# Without these the versions and the machine are not known.
ENVIRONMENT = ("python", "torch", "numpy", "platform", "processor", "threads")


def fault(run: Mapping[str, Any]) -> str:
    """Why a run of a record is not to be believed, in a clause; empty where it is."""
    commit = str(run["environment"].get("commit") or UNKNOWN)
    if commit == UNKNOWN:
        return "it has no commit"
    if commit.endswith("+"):
        return f"it was made with changed files (commit {commit[:8]}+); commit them and run again"
    if commit_exists(commit) is False:
        return f"this repository has no commit {commit[:8]}"
    if not run.get("command"):
        return "it has no command"
    if str(run["command"]).rpartition(" --seeds ")[2] != str(run["seed"]):
        return f"its command is that of another seed ({run['command']})"
    missing = [key for key in ENVIRONMENT if key not in run["environment"]]
    if missing:
        return f"its environment lacks {', '.join(missing)}"
    if run.get("cpu_seconds") is None:
        return "it has no CPU time from scratch; run it again with this version"
    fields = {key: value for key, value in run["config"].items() if key != "seed"}
    if digest_of(fields) != run["digest"]:
        return f"its configuration is not that of {run['digest']}"
    return ""


def missing_seed(seeds: Collection[int], unfinished: Collection[int] = ()) -> int | None:
    """The first seed that is left out: between two others, or started before and not finished."""
    everything = range(min(seeds), max(seeds) + 1)
    begun = {seed for seed in unfinished if seed < max(seeds)}
    left_out = sorted({*everything, *begun} - {*seeds})
    return left_out[0] if left_out else None


def environment() -> dict[str, Any]:
    """What a number may depend on."""
    from importlib import metadata

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
