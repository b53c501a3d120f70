"""The command line: `zeromean NAME …`, or `python -m zeromean NAME …`.

A command is a dataclass, which tyro turns into options, with a `run` method that imports what it
needs and returns an exit code. `COMMANDS` says where they are, those of `zeromean.commands` and
those of `zeromean.experiments.commands`, which know the papers: only the one that was named is
imported, and tyro only where there are options to parse, so that short answers come at once.
"""

from __future__ import annotations

import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import zeromean
from zeromean.commands.messages import nearest, refuse
from zeromean.extras import how_to_install

# What the extra `cli` brings, by the names under which it is imported.
REQUIREMENTS = ("matplotlib", "rich", "sklearn", "tyro")

COMMANDS = {
    "demo": "experiments.commands.demo:Demo",
    "predict": "commands.predict:Predict",
    "inspect": "commands.inspect:Inspect",
    "doctor": "commands.doctor:Doctor",
    "list": "experiments.commands.listing:List",
    "run": "experiments.commands.run:Run",
    "verify": "experiments.commands.verify:Verify",
    "data": "experiments.commands.data:Data",
    "report": "experiments.commands.report:Report",
}


class Command(Protocol):
    """What `main` asks of a command."""

    def run(self) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0; 1 where `verify` finds a difference, or `doctor` a torch that does not work; 2 for what the
    user can mend; 130 for Ctrl-C; 141 where nobody reads any more.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"zeromean {zeromean.__version__}")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Not every terminal knows α and ±.
    if arguments[:1] in (["--help"], ["-h"]):
        print(_help())
        return 0
    if not arguments:
        print(_help(), file=sys.stderr)
        return 2
    name, options = arguments[0], arguments[1:]
    if name not in COMMANDS:
        return refuse(f"there is no command {name!r}; {nearest(name, list(COMMANDS))}")
    if name == "doctor":  # It says what is missing, whatever is.
        return _command(name).from_arguments(options).run()
    missing = [name for name in REQUIREMENTS if find_spec(name) is None]
    if missing:
        return refuse(how_to_install(f"the command line needs {', '.join(missing)}", "cli"))
    try:
        code = _parse(name, options).run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("zeromean: interrupted.", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            return 141  # As of a process that SIGPIPE has ended.
        # What experiments, data sets and reports raise for what the user can mend.
        return refuse(str(error))


def _reader_has_left() -> bool:
    """Whether nobody reads what is printed, as after `zeromean list | head -1`."""
    try:
        print(flush=True)  # A line more, as without a buffer nothing is left to write.
    except BrokenPipeError:
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _command(name: str) -> Any:
    module, _, title = COMMANDS[name].partition(":")
    return getattr(import_module(f"zeromean.{module}"), title)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {_summary(name)}" for name in COMMANDS)
    return "\n".join(
        (
            "usage: zeromean [-h] [--version] COMMAND …",
            "",
            "Networks whose weights are random.",
            "",
            *lines,
            "",
            "`zeromean COMMAND --help` shows the options of a command.",
        )
    )


def _summary(name: str) -> str:
    return _command(name).__doc__.splitlines()[0]


def _parse(name: str, options: list[str]) -> Command:
    if name == "run" and options and not options[0].startswith("-"):
        from zeromean.experiments.commands.run import parse_run

        return parse_run(options[0], options[1:])
    command = _command(name)
    if not options and all(
        field.default is not dataclasses.MISSING for field in dataclasses.fields(command)
    ):
        return command()
    import tyro

    config = (tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff)
    prog = f"zeromean {name}"
    return cast(Command, tyro.cli(command, prog=prog, args=options, config=config))
