"""`zeromean run`: its general options, and those that an experiment has.

An option of every experiment is a field of `RunOptions`; the others are the fields of an
experiment's `Config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeromean.commands.messages import nearest, refuse, require_writable


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that every experiment has."""

    quick: bool = False
    """Start from the size of minutes instead of the full one."""
    smoke: bool = False
    """Start from the size of seconds, which needs no data set."""
    seeds: tuple[int, ...] = ()
    """One run for each; default: the one of --seed."""
    jobs: int = 1
    """Runs at a time, in processes of one thread each."""
    dask: str | None = None
    """Address of a Dask scheduler: its workers make the runs, in a folder that all share."""
    runs: Path = Path("runs")
    """Folder of the runs; finished ones in it are skipped, interrupted ones resumed."""
    data_dir: Path | None = None
    """Folder of the data sets; default: $ZEROMEAN_DATA, else the cache folder of this system."""
    quiet: bool = False
    """Print the results only."""


@dataclass(frozen=True, kw_only=True)
class Run(RunOptions):
    """Run an experiment of `zeromean list`; `zeromean run NAME --help` shows its own options.

    Finished runs are skipped, interrupted ones resumed; Ctrl-C loses nothing.
    """

    name: str
    """The experiment. Its name comes first."""

    def run(self) -> int:
        # Only here where an option stands before the name: then it is not known which there are.
        return refuse(f"the name comes first: zeromean run {self.name} …")


@dataclass(frozen=True)
class ConfiguredRun:
    """`zeromean run`, once it is known which options the experiment has."""

    name: str
    config: Any
    options: RunOptions

    def run(self) -> int:
        from zeromean.experiments.runs import runner

        options = self.options
        if options.quick and options.smoke:
            return refuse("--quick and --smoke are two sizes; choose one.")
        try:
            require_writable(options.runs)
        except OSError as error:
            reason = error.strerror or error
            return refuse(f"cannot write into {options.runs}: {reason}; choose another --runs.")
        place = runner.Place(
            runs=options.runs, data_dir=options.data_dir, progress=not options.quiet
        )
        seeds = options.seeds or (self.config.seed,)
        folders = runner.run_experiment(
            self.name, self.config, seeds, place=place, jobs=options.jobs, dask=options.dask
        )
        _print_metrics(self.name, folders)
        return 0


def parse_run(name: str, arguments: list[str]) -> ConfiguredRun:
    """The options of an experiment: its own, on top of the chosen size, and the general ones."""
    import tyro

    from zeromean.experiments import registry

    experiment = registry.load(name)
    size = experiment.Config()
    if "--quick" in arguments:
        size = experiment.QUICK
    if "--smoke" in arguments:
        size = experiment.SMOKE
    both = dataclasses.make_dataclass(
        "Both",
        [
            ("experiment", experiment.Config, field(default=size)),
            ("general", tyro.conf.FlagCreatePairsOff[RunOptions], field(default=RunOptions())),
        ],
    )
    parsed: Any
    parsed, unknown = tyro.cli(
        both,
        prog=f"zeromean run {name}",
        description=f"{experiment.TITLE}.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
        return_unknown_args=True,
    )
    if unknown:
        options = [
            f"--{option.name.replace('_', '-')}"
            for part in (experiment.Config, RunOptions)
            for option in dataclasses.fields(part)
        ]
        raise ValueError(f"{name} has no option {unknown[0]}; {nearest(unknown[0], options)}")
    return ConfiguredRun(name, parsed.experiment, parsed.general)


def _print_metrics(name: str, folders: Sequence[Path]) -> None:
    from zeromean.experiments.runs import records, runner

    for folder in folders:
        done = runner.read_json(folder / "done.json", "metrics")
        print(f"{name}, {folder.name}: {folder}")
        for key, value in records.flat(done["metrics"]).items():
            print(f"  {key} = {value:.6g}")
