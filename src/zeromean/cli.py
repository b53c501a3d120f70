"""The command line: `zeromean NAME …`, or `python -m zeromean NAME …`.

A command is a dataclass, which tyro turns into options, with a `run` method that imports what it
needs (so that `--help` stays fast) and returns an exit code. `COMMANDS` lists them: those of
`zeromean.commands`, and those of `zeromean.experiments.commands`, which know the papers.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Protocol

import zeromean
from zeromean.commands.doctor import Doctor
from zeromean.commands.inspect import Inspect
from zeromean.commands.messages import refuse
from zeromean.commands.predict import Predict
from zeromean.experiments.commands.data import Data
from zeromean.experiments.commands.demo import Demo
from zeromean.experiments.commands.listing import List
from zeromean.experiments.commands.report import Report
from zeromean.experiments.commands.run import Run, parse_run
from zeromean.experiments.commands.verify import Verify
from zeromean.extras import how_to_install

# What the extra `cli` brings, by the names under which it is imported.
REQUIREMENTS = ("matplotlib", "rich", "sklearn", "tyro")


class Command(Protocol):
    """What `main` asks of a command."""

    def run(self) -> int: ...


COMMANDS: dict[str, Callable[..., Command]] = {
    "demo": Demo,
    "predict": Predict,
    "inspect": Inspect,
    "doctor": Doctor,
    "list": List,
    "run": Run,
    "verify": Verify,
    "data": Data,
    "report": Report,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0; 1 where `verify` finds a difference, or `doctor` a torch that does not work; 2 for what the
    user can mend; 130 for Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"zeromean {zeromean.__version__}")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Not every terminal knows α and ±.
    if arguments[:1] == ["doctor"]:  # It says what is missing, whatever is.
        return Doctor.from_arguments(arguments[1:]).run()
    missing = [name for name in REQUIREMENTS if find_spec(name) is None]
    if missing:
        return refuse(how_to_install(f"the command line needs {', '.join(missing)}", "cli"))
    try:
        return _parse(arguments).run()
    except KeyboardInterrupt:
        print("zeromean: interrupted.", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        # What experiments, data sets and reports raise for what the user can mend.
        return refuse(str(error))


def _parse(arguments: list[str]) -> Command:
    import tyro

    if arguments[:1] == ["run"] and len(arguments) > 1 and not arguments[1].startswith("-"):
        return parse_run(arguments[1], arguments[2:])

    config = (tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff)
    if arguments and arguments[0] in COMMANDS:  # Without the options of all the others.
        name = arguments[0]
        return tyro.cli(COMMANDS[name], prog=f"zeromean {name}", args=arguments[1:], config=config)
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="zeromean",
        description="Networks whose weights are random. `zeromean --version` prints the version.",
        args=arguments,
        config=config,
    )
