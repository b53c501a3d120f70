"""Random arguments of every command, in this process."""

from __future__ import annotations

import os
import random
import string
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path

from fuzzing.outcomes import CHECKED, REFUSED, require
from fuzzing.records import call
from zeromean import cli
from zeromean.experiments import registry

# A whole run of it takes a part of a second.
CHEAP = ("fig2",)
CODES = (0, 1, 2)
WORDS = (
    "", "-", "--", "---", "x", "0", "1", "-1", "1.5", "nan", "inf", "1e400", "9" * 400, "None",
    "True", "no such folder", "/dev/null", "/proc", "\u2028", "ä", "a\nb", "\x00", "--help", "-h",
    "--version", "--quick", "--smoke", "--quiet", "--seed", "--seeds", "--runs", "--jobs",
    "--collect", "--markdown", "--results", "--output", "--own", "--data-dir", "[bold]", "[/]",
    "%s", "{}", "../..",
)  # fmt: skip


def prepare(folder: Path) -> Callable[[random.Random], str]:
    # What a command would fetch is not there, and there is nowhere to get it from.
    os.environ["ZEROMEAN_DATA"] = str(folder / "data")
    with chdir(folder):
        call("run", "fig2", "--smoke", "--quiet")
    return partial(case, folder)


def case(folder: Path, generator: random.Random) -> str:
    arguments = _arguments(generator)
    with chdir(folder):
        code, text = call(*arguments)
    require(code in CODES, f"{arguments} ended with {code!r}")
    require("Traceback (most recent" not in text, f"{arguments}: {text}")
    if code != 2:
        return CHECKED
    require(len(text.split()) >= 3, f"{arguments} was refused without a sentence: {text!r}")
    return REFUSED


def _arguments(generator: random.Random) -> list[str]:
    pick = generator.choice
    command = pick(
        (
            "list",
            "run",
            "run",
            "run",
            "run",
            "verify",
            "data",
            "report",
            pick(WORDS),
            _word(generator),
        )
    )
    arguments = [command]
    if command in ("run", "verify"):
        names = (*registry.REGISTRY, *CHEAP, pick(WORDS), _word(generator))
        name = pick(names)
        arguments.append(name)
        if command == "run":
            arguments += _options_of_run(name, generator)
        elif name in registry.REGISTRY:
            # Never a real run: without a record there is nothing to compare with.
            arguments += ["--results", "no such folder", "--own", "no such folder"]
    elif command == "data":
        arguments.append(pick(("digits", "toy", "mnst", pick(WORDS), _word(generator))))
    elif command == "report":
        arguments += generator.sample(("--collect", "--output", "page.html"), k=pick((0, 1, 1, 2)))
    for _ in range(pick((0, 0, 1, 2))):
        arguments.insert(
            generator.randrange(1, len(arguments) + 1), pick((*WORDS, _word(generator)))
        )
    return arguments if command in cli.COMMANDS or command != "demo" else ["--version"]


def _options_of_run(name: str, generator: random.Random) -> list[str]:
    """Options of an experiment with values that may be wrong; a size of seconds, or none at all."""
    pick = generator.choice
    if name not in registry.REGISTRY:
        return []
    experiment = registry.load(name)
    fields = list(vars(experiment.Config()))
    options = []
    for _ in range(pick((0, 1, 1, 2))):
        options += [f"--{pick(fields).replace('_', '-')}", pick((*WORDS[5:14], _word(generator)))]
    if name in CHEAP:
        return ["--smoke", "--quiet", *options]
    return [*options, "--no-such-option"]  # Parsed, and then refused: it would take hours.


def _word(generator: random.Random) -> str:
    letters = string.ascii_lowercase + "-_=. 01"
    return "".join(generator.choice(letters) for _ in range(generator.randrange(1, 12)))
