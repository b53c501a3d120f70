"""Tables and figures of the papers, one module each.

An experiment is a module with

- `TITLE`: what it shows, in one line,
- `SOURCE`: which document, and where in it,
- `NEEDS`: the data sets that it reads; its smoke size reads none but the built-in ones,
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

import difflib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.log import RunLog

REGISTRY: dict[str, str] = {
    "fig1": "zeromean.experiments.variance_networks.fig1",
    "fig2": "zeromean.experiments.variance_networks.fig2",
    "theorem1": "zeromean.experiments.variance_networks.theorem1",
    "variance_reduction": "zeromean.experiments.variance_networks.variance_reduction",
    "table1": "zeromean.experiments.variance_networks.table1",
    "table2": "zeromean.experiments.variance_networks.table2",
    "table3": "zeromean.experiments.variance_networks.table3",
    "noises": "zeromean.experiments.variance_networks.noises",
    "fig3": "zeromean.experiments.variance_networks.fig3",
    "fig4": "zeromean.experiments.variance_networks.fig4",
    "fig5": "zeromean.experiments.variance_networks.fig5",
    "snr_pruning": "zeromean.experiments.variance_networks.snr_pruning",
    "fig9": "zeromean.experiments.variance_networks.fig9",
    "num_samples": "zeromean.experiments.variance_networks.num_samples",
    "conv_lrt": "zeromean.experiments.variance_networks.conv_lrt",
    "sparse_lenet300": "zeromean.experiments.sparse_networks.sparse_lenet300",
    "sparse_lenet5": "zeromean.experiments.sparse_networks.sparse_lenet5",
    "compression": "zeromean.experiments.sparse_networks.compression",
    "structured_lenet5": "zeromean.experiments.sparse_networks.structured_lenet5",
    "sparse_lstm": "zeromean.experiments.sparse_networks.sparse_lstm",
    "random_labels": "zeromean.experiments.sparse_networks.random_labels",
    "random_labels_vgg": "zeromean.experiments.sparse_networks.random_labels_vgg",
    "linear_synthetic": "zeromean.experiments.linear_models.linear_synthetic",
    "linear_large": "zeromean.experiments.linear_models.linear_large",
    "linear_real": "zeromean.experiments.linear_models.linear_real",
    "kernel_rvm": "zeromean.experiments.linear_models.kernel_rvm",
    "fig6": "zeromean.experiments.exploration.fig6",
    "deep_sea": "zeromean.experiments.exploration.deep_sea",
    "bandit": "zeromean.experiments.exploration.bandit",
}


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
    return cast(Experiment, import_module(REGISTRY[name]))


def version(name: str) -> int:
    """The version of an experiment, which is raised when the meaning of its numbers changes."""
    return getattr(load(name), "VERSION", 1)


def covered() -> set[str]:
    """The keys of the documents' items that some experiment is about."""
    return {key for name in REGISTRY for key in load(name).COVERS}
