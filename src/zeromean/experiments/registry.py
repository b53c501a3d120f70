"""Tables and figures of the papers, one module each.

An experiment is a module with

- `TITLE`: what it shows, in one line of the file, which makes the module an experiment,
- `SOURCE`: which document, and where in it,
- `NEEDS`: the data sets that it reads, likewise; its smoke size reads none but the built-in ones,
- `Config`: a frozen dataclass, every field documented, with a `seed`; its defaults are full size,
- `QUICK`: a Config of minutes, and `SMOKE`: the smallest honest one, of seconds,
- `CLAIMS`: what is claimed, and by whom, for the report to put next to what was measured,
- `COVERS`: which tables and figures of the documents it is about (`documents.ITEMS`),
- `run(config, log)`: does the work and returns the final metrics, numbers or lists of them,
- `figures(records)`: plain descriptions of the figures, from the metrics of finished runs,
- `NOTES`, where ours is not as the document's: what was checked, in paragraphs. Numbers in them
  are filled in when a page is written: {metric}, {setting NAME}, {claim METRIC},
- `VERSION`, where it is not 1: a number that is raised when the meaning of its numbers changes;
  records of an older version are stale,
- `DETERMINISTIC = True`, where nothing is random: then one run is enough for a verdict,
- `TIMINGS`, where numbers depend on the machine: patterns of metrics that `verify` leaves out.

`zeromean run NAME` runs one; `runner` says how, and `records` what is kept of it.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from zeromean.experiments.runs.claims import Claim
    from zeromean.experiments.runs.log import RunLog

# One folder a document, in this order; in a folder modules are taken by name.
FOLDERS = (
    "variance_networks",
    "sparse_networks",
    "linear_models",
    "exploration",
    "bayesian",
    "uncertainty",
)


class Entry(NamedTuple):
    """What is known of an experiment before it is imported, which takes torch."""

    module: str
    title: str
    needs: tuple[str, ...]


def _entries() -> Iterator[tuple[str, Entry]]:
    """Every module that has a TITLE is an experiment: there is no list to forget it in."""
    for folder in FOLDERS:
        for path in sorted((Path(__file__).parent / folder).glob("*.py")):
            found = {
                name: ast.literal_eval(line.partition(" = ")[2])
                for line in path.read_text("utf-8").splitlines()
                if (name := line.partition(" = ")[0].partition(":")[0]) in ("TITLE", "NEEDS")
            }
            if "TITLE" in found:
                module = f"{__package__}.{folder}.{path.stem}"
                yield path.stem, Entry(module, found["TITLE"], found["NEEDS"])


REGISTRY: dict[str, Entry] = dict(_entries())


class Experiment(Protocol):
    """What a module of this package offers."""

    TITLE: str
    SOURCE: str
    NEEDS: tuple[str, ...]
    Config: type[Any]
    QUICK: Any
    SMOKE: Any
    CLAIMS: list[Claim]
    COVERS: tuple[str, ...]

    def run(self, config: Any, log: RunLog) -> dict[str, Any]: ...

    def figures(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]: ...


def load(name: str) -> Experiment:
    """Import an experiment; a ValueError names the nearest one where there is none."""
    if name not in REGISTRY:
        nearest = difflib.get_close_matches(name, REGISTRY, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(REGISTRY)}."
        raise ValueError(f"there is no experiment {name!r}; {hint}")
    return cast(Experiment, import_module(REGISTRY[name].module))


def version(name: str) -> int:
    """The version of an experiment, which is raised when the meaning of its numbers changes."""
    return getattr(load(name), "VERSION", 1)


def covered() -> set[str]:
    """The keys of the documents' items that some experiment is about."""
    return {key for name in REGISTRY for key in load(name).COVERS}
