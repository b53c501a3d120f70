"""Random cases of everything that takes input: layers, files, estimators, the command line.

    python tools/fuzz.py --cases 100000 --seed 0

Every case is answered, and the answer checked by another route, or refused with a sentence.
Anything else is a failure: a raw traceback or a silent wrong result. What reproduces it is printed
with it; `make test` runs a few hundred cases.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]  # The damages of files are the tests'.

from fuzzing import command_line, estimators, files, layers, networks, records  # noqa: E402

Case = Callable[[random.Random], str]
Prepare = Callable[[Path], Case]


@dataclass(frozen=True)
class Part:
    """Cases of one sort, and how many of a thousand are of it: most of them are the cheap ones."""

    kind: str
    name: str
    prepare: Prepare
    share: int


PARTS = (
    Part("estimators", "estimators", estimators.prepare, 40),
    Part("command-line", "command-line", command_line.prepare, 10),
    Part("files", "records", records.prepare, 5),
    Part("files", "models", files.prepare, 245),
    Part("layers", "networks", networks.prepare, 40),
    Part("layers", "layers", layers.prepare, 660),
)
KINDS = tuple(dict.fromkeys(part.kind for part in PARTS))


@dataclass
class Counts:
    """What became of the cases of one part."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0


def run(part: Part, numbers: range, seed: int, folder: Path) -> Counts:
    """Run some cases; each depends on the seed and its number alone."""
    counts = Counts()
    started = time.monotonic()
    case = part.prepare(folder)
    for number in numbers:
        generator = random.Random(f"{seed} {part.name} {number}")
        torch.manual_seed(generator.getrandbits(32))
        np.random.seed(generator.getrandbits(32))  # What scikit-learn draws without a seed.
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                counts.outcomes[case(generator)] += 1
        except Exception:
            counts.failures.append((number, traceback.format_exc(limit=-6)))
    counts.seconds = time.monotonic() - started
    return counts


def shares(cases: int, parts: tuple[Part, ...]) -> Iterator[tuple[Part, int]]:
    total = sum(part.share for part in parts)
    for part in parts:
        yield part, max(1, round(cases * part.share / total))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="default: all")
    parser.add_argument("--only", metavar="NAME:NUMBER", help="one case again, as a failure says")
    chosen = parser.parse_args(arguments)
    parts = tuple(part for part in PARTS if chosen.kind in (None, part.kind))
    if chosen.only:
        name, _, number = chosen.only.rpartition(":")
        parts = tuple(part for part in PARTS if part.name == name)
        if not parts or not number.isdigit():
            names = ", ".join(part.name for part in PARTS)
            parser.error(f"--only needs NAME:NUMBER with a name of {names}, got {chosen.only!r}.")
        numbers = {part: range(int(number), int(number) + 1) for part in parts}
    else:
        numbers = {part: range(count) for part, count in shares(chosen.cases, parts)}
    print(f"{'':14}{'cases':>9}{'refused':>9}{'checked':>9}{'failures':>10}{'seconds':>9}")
    failed = 0
    for part, chosen_numbers in numbers.items():
        with tempfile.TemporaryDirectory() as folder:
            counts = run(part, chosen_numbers, chosen.seed, Path(folder))
        print(
            f"{part.name:14}{len(chosen_numbers):9}{counts.outcomes['refused']:9}"
            f"{counts.outcomes['checked']:9}{len(counts.failures):10}{counts.seconds:9.0f}",
            flush=True,
        )
        failed += len(counts.failures)
        for number, text in counts.failures[:20]:
            print(
                f"\npython tools/fuzz.py --seed {chosen.seed} --only {part.name}:{number}\n{text}"
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
