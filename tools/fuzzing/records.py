"""Damaged runs and records under `zeromean list` and `zeromean report`: the others are shown."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from file_fuzzer import cut_and_paste, flip_bits, mutated
from fuzzing.outcomes import CHECKED, REFUSED, require
from zeromean import cli

ROOT = Path(__file__).parents[2]
# The experiment that is run, and records next to it.
OWN = "fig2"
RECORDS = ("fig9", "conv_lrt", "bandit")
NESTED = 100_000


def prepare(folder: Path) -> Callable[[random.Random], str]:
    """Sound runs of one cheap experiment, and records of others."""
    sound = folder / "sound"
    for seed in ("0", "1"):
        code, text = call("run", OWN, "--smoke", "--quiet", "--seed", seed, *_places(sound)[:2])
        require(code == 0, text)
    (sound / "results").mkdir()
    for name in RECORDS:
        shutil.copy(ROOT / "results" / "experiments" / f"{name}.json", sound / "results")
    return partial(case, sound, folder / "damaged")


def case(sound: Path, folder: Path, generator: random.Random) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    files = [*folder.glob(f"runs/{OWN}/*/seed-*/*.json"), *folder.glob("results/*.json")]
    path = generator.choice(sorted(files))
    _damage(path, generator)
    runs, results = _places(folder)[:2], _places(folder)[2:]
    if path.parent.name != "results" and generator.random() < 0.7:
        code, text = call("list", *runs)
        require(all(each in text for each in (OWN, *RECORDS)), "the others are not listed")
    else:
        page = folder / "report.html"
        collect = ["--collect"] if generator.random() < 0.5 else []
        code, text = call("report", *collect, *runs, *results, "--output", str(page))
        content = page.read_text("utf-8")
        for name in (OWN, *RECORDS):
            require(f'<section id="{name}"' in content, f"{name} is not on the page")
            sound_one = name != OWN and path.stem != name
            not_run = f'<section id="{name}" class="not-run"' in content
            require(not (sound_one and not_run), f"{name} is sound, and not shown")
    require(code in (0, 2), f"exit code {code}: {text}")
    require("Traceback" not in text, text)
    # Runs of changed files are not collected, which is no damage.
    said = [line for line in text.splitlines() if "is not collected" not in line]
    if code == 0 or not any(line.startswith("zeromean: ") for line in said):
        return CHECKED
    place = path if path.parent.name == "results" else folder / "runs" / OWN
    require(any(str(place) in line for line in said), f"{path} is not named: {text}")
    return REFUSED


def _places(folder: Path) -> list[str]:
    return ["--runs", str(folder / "runs"), "--results", str(folder / "results")]


def _damage(path: Path, generator: random.Random) -> None:
    kind = generator.randrange(5)
    if kind == 0:
        flip_bits(path, path, generator)
    elif kind == 1:
        cut_and_paste(path, path, generator)
    elif kind == 2:
        path.write_text(
            generator.choice(("", "[" * NESTED, "9" * 5000, "null", "[]", '"x"', "\x00"))
        )
    else:
        content = mutated(json.loads(path.read_text("utf-8")), generator)
        if generator.random() < 0.5 and isinstance(content, dict):
            content.pop("checksum", None)  # As the runner of 0.1.0 wrote them.
        path.write_text(json.dumps(content), "utf-8")


def call(*arguments: str) -> tuple[Any, str]:
    """The exit code of a command, and all that it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = cli.main(arguments)
        except SystemExit as exit:
            code = exit.code
    return code, said.getvalue()
