"""A fresh seed against a record: does each number lie where the record's seeds say it must?"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zeromean.experiments import registry
from zeromean.experiments.runs import records, runner
from zeromean.experiments.runs.finished_runs import flat, is_timing
from zeromean.experiments.runs.identity import digest, run_folder
from zeromean.experiments.runs.intervals import prediction_interval
from zeromean.experiments.runs.json_files import read_json
from zeromean.experiments.runs.provenance import UNKNOWN

CONFIDENCE = 0.99
FEWEST = 3
FIRST_SEED = 1000
# Of what is not random: the same sum on another processor may differ in its last digits.
RELATIVE = 1e-6

INSIDE = "inside"
OUTSIDE = "outside"
NO_SPREAD = "no spread"


class Comparison(NamedTuple):
    """One number of a fresh run next to those of a record.

    Attributes:
        metric: Its name.
        mean: Mean over the record's seeds.
        interval: Where the next seed must lie; None where the record's seeds do not differ.
        fresh: What it is, nan where it is not finite or missing.
        verdict: INSIDE, OUTSIDE, or NO_SPREAD: it differs from a number that was the same for all
            seeds of the record, which say nothing about how far others may be off.
    """

    metric: str
    mean: float
    interval: tuple[float, float] | None
    fresh: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Reference:
    """The runs of a record that a fresh one is compared with."""

    name: str
    config: Any
    """Their configuration, with the seed of the first."""
    runs: Sequence[Mapping[str, Any]]
    taken: frozenset[int]
    """Seeds that are in the record."""

    @property
    def deterministic(self) -> bool:
        return getattr(registry.load(self.name), "DETERMINISTIC", False)

    def seed(self, wanted: int | None = None) -> int:
        """A seed that no record has; a ValueError where the wanted one is in it."""
        if wanted is None:
            return next(s for s in range(FIRST_SEED, 2**32) if s not in self.taken)
        if wanted in self.taken:
            raise ValueError(
                f"seed {wanted} is in the record of {self.name}; choose another, such as "
                f"{self.seed()}."
            )
        return wanted


def reference(
    name: str, results: Path, *, size: str = "full", runs: Path | None = None
) -> Reference:
    """What a fresh run of an experiment is to be compared with.

    Args:
        size: "full" or "quick".
        runs: A folder of finished runs, which count too.

    Raises:
        ValueError: There is no record, or it is stale, or it has too few seeds.
    """
    experiment = registry.load(name)
    path = results / f"{name}.json"
    if size == "quick" and digest(experiment.QUICK) == digest(experiment.Config()):
        size = "full"  # It takes no longer.
    found = records.with_own_runs(results, runs, only=(name,)).get(name)
    of_size = [run for run in found["runs"] if run["size"] == size] if found else []
    option = f" --{size}" if size != "full" else ""
    remedy = f"`zeromean run {name}{option} --seeds 0 1 2` makes the runs"
    if not of_size:
        raise ValueError(f"there is no record of {name} at {size} size in {path}; {remedy}.")
    own = of_size[0].get("own", False)
    # The first configuration is the one that is shown.
    chosen = [
        run
        for run in of_size
        if run["digest"] == of_size[0]["digest"] and run.get("own", False) == own
    ]
    today = registry.version(name)
    if any(run.get("version", 1) < today for run in chosen):
        raise ValueError(
            f"the record of {name} is stale: it is of version {chosen[0].get('version', 1)} of the "
            f"experiment, which is at {today}; {remedy}."
        )
    if len(chosen) < FEWEST and not getattr(experiment, "DETERMINISTIC", False):
        seeds = f"{len(chosen)} seed{'s' if len(chosen) != 1 else ''}"
        raise ValueError(
            f"the record of {name} has {seeds}, and a prediction interval takes {FEWEST}; {remedy}."
        )
    return Reference(
        name,
        _config(experiment, chosen[0]["config"], path),
        chosen,
        frozenset(run["seed"] for run in found["runs"]) if found else frozenset(),
    )


def compare(reference: Reference, metrics: Mapping[str, Any]) -> list[Comparison]:
    """Every number that all runs of a record have, but for times, against that of a fresh run."""
    names = [
        name
        for name in reference.runs[0]["metrics"]
        if not is_timing(reference.name, name)
        and all(_is_number(run["metrics"].get(name)) for run in reference.runs)
    ]
    values = {name: [run["metrics"][name] for run in reference.runs] for name in names}
    fresh = {name: value for name, value in flat(metrics).items() if _is_number(value)}
    spread = [name for name in names if min(values[name]) < max(values[name])]
    # So that all of them are inside with this confidence (Bonferroni).
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(spread))
    compared = []
    for name in names:
        found, mean = fresh.get(name, math.nan), statistics.fmean(values[name])
        if reference.deterministic:
            slack = RELATIVE * abs(mean)
            interval = mean - slack, mean + slack
        else:
            interval = prediction_interval(values[name], confidence) if name in spread else None
        if interval is not None:
            verdict = INSIDE if interval[0] <= found <= interval[1] else OUTSIDE
        elif math.isnan(found):
            verdict = OUTSIDE
        else:
            verdict = INSIDE if found == mean else NO_SPREAD
        compared.append(Comparison(name, mean, interval, found, verdict))
    return compared


def _config(experiment: registry.Experiment, settings: Mapping[str, Any], path: Path) -> Any:
    """The configuration of a record, where today's experiment still has all of its fields."""
    fields = {field.name for field in dataclasses.fields(experiment.Config)}
    unknown = sorted(settings.keys() - fields)
    if unknown:
        raise ValueError(
            f"{path} has the setting {unknown[0]}, which the experiment has no longer; run it anew."
        )
    return experiment.Config(
        **{key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def fresh_run(reference: Reference, seed: int, place: runner.Place) -> Path:
    """Run an experiment with the settings of a record and another seed."""
    (folder,) = runner.run_experiment(reference.name, reference.config, [seed], place=place)
    return folder


def finished_before(reference: Reference, seed: int, place: runner.Place) -> str:
    """The commit at which this fresh run was made already, and is not made again; else empty."""
    config = dataclasses.replace(reference.config, seed=seed)
    path = run_folder(reference.name, config, place.runs) / "done.json"
    return str(read_json(path).get("commit") or UNKNOWN)[:8] if path.exists() else ""
