"""The command line: `zeromean demo | list | run | verify | data | report`, or `python -m zeromean`.

A command is a dataclass, which tyro turns into options, with a `run` method that imports what it
needs (so that `--help` stays fast) and returns an exit code. `COMMANDS` lists them. The options of
`run` depend on the experiment: they are the fields of its `Config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import zeromean
from zeromean.extras import how_to_install

# What the extra `cli` brings, by the names under which it is imported.
REQUIREMENTS = ("matplotlib", "rich", "sklearn", "tyro")
RECORDS = Path("results/experiments")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Show what a variance network is, in about a minute: a table, and pictures in a folder.

    Trains a deterministic network, one with dropout and a variance network on scikit-learn's
    digits, and the toy problem of Figure 1.
    """

    output: Path = Path("demo")
    """Folder for the pictures; created if need be."""
    seed: int = 0
    """Seed of everything random: the same seed gives the same numbers."""

    def run(self) -> int:
        if not 0 <= self.seed < 2**32:
            return _refuse(f"--seed must lie between 0 and 2³² − 1, got {self.seed}.")
        try:
            _require_writable(self.output)
            from zeromean.experiments.demo import run_demo

            run_demo(self.output, seed=self.seed)
        except OSError as error:
            reason = error.strerror or error
            return _refuse(f"cannot write into {self.output}: {reason}; choose another --output.")
        return 0


@dataclass(frozen=True, kw_only=True)
class List:
    """Show the tables and figures, what they need, and which have been run here."""

    runs: Path = Path("runs")
    """Folder of the runs."""

    def run(self) -> int:
        from rich.console import Console
        from rich.table import Table

        from zeromean.experiments import registry
        from zeromean.experiments.runs import records

        damages: list[str] = []
        table = Table(box=None, pad_edge=False)
        for heading in ("name", "what it shows", "data", f"in {self.runs}"):
            table.add_column(heading)
        for name, entry in registry.REGISTRY.items():
            needs = ", ".join(entry.needs) or "–"
            found = records.status(name, self.runs, damages.append)
            table.add_row(name, entry.title, needs, found)
        Console().print(table)
        return _tell(damages)


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
        return _refuse(f"the name comes first: zeromean run {self.name} …")


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
            return _refuse("--quick and --smoke are two sizes; choose one.")
        try:
            _require_writable(options.runs)
        except OSError as error:
            reason = error.strerror or error
            return _refuse(f"cannot write into {options.runs}: {reason}; choose another --runs.")
        place = runner.Place(
            runs=options.runs, data_dir=options.data_dir, progress=not options.quiet
        )
        seeds = options.seeds or (self.config.seed,)
        folders = runner.run_experiment(
            self.name, self.config, seeds, place=place, jobs=options.jobs, dask=options.dask
        )
        _print_metrics(self.name, folders)
        return 0


@dataclass(frozen=True, kw_only=True)
class Data:
    """Fetch a data set, or explain how to provide it, and check its files."""

    name: str
    """mnist, fashion-mnist, notmnist, cifar10, cifar100, digits or toy."""
    data_dir: Path | None = None
    """Folder of the data sets; default: $ZEROMEAN_DATA, else the cache folder of this system."""

    def run(self) -> int:
        from zeromean import data

        if self.name not in data.NAMES:
            return _refuse(f"there is no data set {self.name!r}; {_nearest(self.name, data.NAMES)}")
        sentence = ""
        try:
            data.download(self.name, self.data_dir)
        except (ValueError, OSError) as error:
            sentence = str(error)
        files = data.verify(self.name, self.data_dir)
        for file in files:
            print(f"{file.path}: {file.state}")
        if not files:
            print(f"{self.name} is built in.")
        damaged = [file for file in files if file.state != "ok"]
        if sentence or not damaged:
            return _refuse(sentence) if sentence else 0
        return _refuse(f"{damaged[0].path} is {damaged[0].state}; remove it, and try again.")


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run an experiment with a seed that no record has, and compare it number by number.

    Says of each number whether it lies in the 99% prediction interval of the record's seeds
    (Student's t, corrected for how many numbers there are). The exit code is 1 where one does not.
    """

    name: str
    """The experiment."""
    seed: int | None = None
    """The fresh seed; default: the smallest from 1000 on that no record has."""
    quick: bool = False
    """Compare runs of the quick size, those in the record and in --own."""
    results: Path = RECORDS
    """Folder of the records."""
    own: Path = Path("runs")
    """Folder of finished runs, which count as a record where there is none."""
    runs: Path = Path("runs/verify")
    """Folder of the fresh runs, which share nothing with the others."""
    data_dir: Path | None = None
    """Folder of the data sets; default: $ZEROMEAN_DATA, else the cache folder of this system."""
    quiet: bool = False
    """Print the table only."""

    def run(self) -> int:
        from zeromean.experiments.runs import runner, verify

        size = "quick" if self.quick else "full"
        reference = verify.reference(self.name, self.results, size=size, runs=self.own)
        seed = reference.seed(self.seed)
        try:
            _require_writable(self.runs)
        except OSError as error:
            reason = error.strerror or error
            return _refuse(f"cannot write into {self.runs}: {reason}; choose another --runs.")
        place = runner.Place(runs=self.runs, data_dir=self.data_dir, progress=not self.quiet)
        folder = verify.fresh_run(reference, seed, place)
        done = runner.read_json(folder / "done.json", "metrics")
        compared = verify.compare(reference, done["metrics"])
        _print_comparison(compared, seed, len(reference.runs))
        return int(any(each.verdict == verify.OUTSIDE for each in compared))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one web page from the records and your own runs: documents' numbers next to ours."""

    results: Path | None = None
    """Folder of the records, one JSON file an experiment; default: results/experiments."""
    output: Path = Path("report.html")
    """The page."""
    markdown: Path | None = None
    """Write the tables of the records into this file too, as Markdown; without your own runs."""
    collect: bool = False
    """First make the records from the finished runs."""
    runs: Path = Path("runs")
    """Folder of your own runs, which are shown next to the records, and for --collect."""

    def run(self) -> int:
        from zeromean.experiments.report import build, build_markdown
        from zeromean.experiments.report.records import parse_record, read_records
        from zeromean.experiments.runs import records
        from zeromean.experiments.runs.damage import damage_of

        refused: list[str] = []

        def refuse(sentence: str) -> None:
            if sentence not in refused:
                refused.append(sentence)

        results = RECORDS if self.results is None else self.results
        if self.collect:
            for path in records.collect(self.runs, results, refuse):
                print(f"wrote {path}")
        # A folder that was asked for must be there; without one, own runs are enough.
        asked_for = self.results is not None and not self.collect
        has_records = results.is_dir() or asked_for or not self.runs.is_dir()
        found = dict(read_records(results, refuse)) if has_records else {}
        own = records.with_own_runs(results if has_records else None, self.runs, refuse)
        for name, content in own.items():
            # The others are as they were read, and what is wrong with them has been said.
            if content.get("unfinished") or any(run.get("own") for run in content["runs"]):
                with damage_of(self.runs / name, refuse):
                    found[name] = parse_record(content, self.runs / name)
        known = _registry()
        build(found, self.output, known, refuse)
        print(f"wrote {self.output}")
        if self.markdown is not None:
            figures = "`zeromean report` draws the figures, in one page that works offline."
            build_markdown(results, self.markdown, known, figures=figures, on_damage=refuse)
            print(f"wrote {self.markdown}")
        return _tell(refused)


class Command(Protocol):
    """What `main` asks of a command."""

    def run(self) -> int: ...


COMMANDS: dict[str, Callable[..., Command]] = {
    "demo": Demo,
    "list": List,
    "run": Run,
    "verify": Verify,
    "data": Data,
    "report": Report,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0; 1 where `verify` finds a difference; 2 for what the user can mend; 130 for Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"zeromean {zeromean.__version__}")
        return 0
    missing = [name for name in REQUIREMENTS if find_spec(name) is None]
    if missing:
        return _refuse(how_to_install(f"the command line needs {', '.join(missing)}", "cli"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Not every terminal knows α and ±.
    try:
        return _parse(arguments).run()
    except KeyboardInterrupt:
        print("zeromean: interrupted.", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        # What experiments, data sets and reports raise for what the user can mend.
        return _refuse(str(error))


def _parse(arguments: list[str]) -> Command:
    import tyro

    if arguments[:1] == ["run"] and len(arguments) > 1 and not arguments[1].startswith("-"):
        return _parse_run(arguments[1], arguments[2:])

    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="zeromean",
        description="Networks whose weights are random. `zeromean --version` prints the version.",
        args=arguments,
        config=(tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff),
    )


def _parse_run(name: str, arguments: list[str]) -> ConfiguredRun:
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
        raise ValueError(f"{name} has no option {unknown[0]}; {_nearest(unknown[0], options)}")
    return ConfiguredRun(name, parsed.experiment, parsed.general)


def _print_metrics(name: str, folders: Sequence[Path]) -> None:
    from zeromean.experiments.runs import records, runner

    for folder in folders:
        done = runner.read_json(folder / "done.json", "metrics")
        print(f"{name}, {folder.name}: {folder}")
        for key, value in records.flat(done["metrics"]).items():
            print(f"  {key} = {value:.6g}")


def _print_comparison(compared: Sequence[Any], seed: int, num_seeds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from zeromean.experiments.report.formats import format_number
    from zeromean.experiments.runs import verify

    table = Table(box=None, pad_edge=False)
    for heading in ("number", f"mean of {num_seeds}", "99% interval", f"seed {seed}", ""):
        table.add_column(heading)
    for each in compared:
        ends = "–" if each.interval is None else ", ".join(map(format_number, each.interval))
        row = (each.metric, format_number(each.mean), ends, format_number(each.fresh))
        table.add_row(*row, each.verdict, style="bold" if each.verdict == verify.OUTSIDE else None)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    counts = {
        verdict: sum(each.verdict == verdict for each in compared)
        for verdict in (verify.INSIDE, verify.OUTSIDE, verify.NO_SPREAD)
    }
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + ".")


def _registry() -> Any:
    """What there is to report on."""
    from zeromean.experiments import registry
    from zeromean.experiments.report import Registry
    from zeromean.experiments.runs import documents

    missing = documents.not_reproduced(registry.covered())
    return Registry(
        titles={name: entry.title for name, entry in registry.REGISTRY.items()},
        versions={name: registry.version(name) for name in registry.REGISTRY},
        missing={
            document: [(item.place, item.what, item.why_not) for item in items]
            for document, items in missing.items()
        },
    )


def _nearest(name: str, names: Sequence[str]) -> str:
    bare = {each.strip("-"): each for each in names}  # All options begin alike.
    nearest = difflib.get_close_matches(name.strip("-"), bare, n=1, cutoff=0.4)
    return f"did you mean {bare[nearest[0]]}?" if nearest else f"there are {', '.join(names)}."


def _require_writable(folder: Path) -> None:
    """Find out before the work, not after it, that its results have nowhere to go."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _tell(damages: Sequence[str]) -> int:
    """Say what could not be read; the rest has been shown. Returns the exit code."""
    for sentence in dict.fromkeys(damages):
        _refuse(sentence)
    return 2 if damages else 0


def _refuse(sentence: str) -> int:
    print(f"zeromean: {sentence}", file=sys.stderr)
    return 2
