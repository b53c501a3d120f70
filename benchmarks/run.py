"""Runs the benchmarks, prints the tables, and writes the record.

python benchmarks/run.py                  everything, about 12 minutes
python benchmarks/run.py --quick          about 2 minutes
python benchmarks/run.py --only training  rows whose group or name contains a word
"""

import argparse
import os
import sys
import time
from pathlib import Path

# By default glibc gives freed memory back to the system, and every step pays thousands of page
# faults to get it again: up to 13 ms a step, at random, for whichever network is unlucky. These
# settings keep the memory. They are read when a process starts, hence the restart.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
if not ALLOCATOR.items() <= os.environ.items():
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)

PROJECT = Path(__file__).resolve().parent.parent
# Measure this checkout, also where it is not installed.
sys.path.insert(0, str(PROJECT / "src"))

import torch  # noqa: E402
from measurements import Settings  # noqa: E402
from record import Result, tables, write  # noqa: E402
from roster import NotInstalledError  # noqa: E402
from rows import Row, all_rows  # noqa: E402

DEFAULT_OUTPUT = PROJECT / "results" / "benchmarks.json"


def main() -> int:
    options = _parse()
    torch.set_num_threads(1)
    settings = Settings(
        repeats=options.repeats or (7 if options.quick else 31),
        budget=1.5 if options.quick else 6.0,
    )
    rows = [row for row in all_rows() if _is_wanted(row, options)]
    if not rows:
        print(f"No row matches {options.only}.", file=sys.stderr)
        return 2

    results = []
    for number, row in enumerate(rows, start=1):
        start = time.perf_counter()
        result = _measure(row, settings)
        seconds = time.perf_counter() - start
        text = result.value if result.reading else result.problem
        print(
            f"[{number}/{len(rows)}] {row.group} · {row.name}: {text} ({seconds:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
        results.append(result)

    print(tables(results))
    if options.output:
        write(options.output, results, settings)
        print(f"\nRecord: {options.output.name}", file=sys.stderr)
    # A peer that fails says so in its row; only a row of ours is an error.
    ours = [result for result in results if "zeromean" in result.row.name]
    return int(any(result.problem.startswith("failed") for result in ours))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows, fewer repeats")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="part of a row's or group's name")
    parser.add_argument("--repeats", type=int, help="pairs a row, at most")
    parser.add_argument(
        "--output",
        type=Path,
        help="record to write; without it, only a full run writes results/benchmarks.json",
    )
    options = parser.parse_args()
    # A partial run must not replace the committed record of a full one.
    if options.output is None and not (options.quick or options.only):
        options.output = DEFAULT_OUTPUT
    return options


def _is_wanted(row: Row, options: argparse.Namespace) -> bool:
    if options.quick and not row.quick:
        return False
    words = options.only or [""]
    return any(word.lower() in f"{row.group} {row.name}".lower() for word in words)


def _measure(row: Row, settings: Settings) -> Result:
    # A package that breaks costs its own row, not everybody's ten minutes.
    torch.manual_seed(0)
    try:
        return Result(row, row.measure(settings))
    except NotInstalledError:
        return Result(row, None, "not installed")
    except NotImplementedError as error:
        return Result(row, None, str(error))
    except Exception as error:
        print(f"{row.name}: {error!r}", file=sys.stderr)
        return Result(row, None, f"failed: {type(error).__name__}")


if __name__ == "__main__":
    sys.exit(main())
