"""The demo's two tables: printed, and as a small record that README is checked against."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zeromean as zm
from zeromean.experiments.demo.digits import Accuracies, separation
from zeromean.files.atomic import whole_file
from zeromean.prediction.classification import PredictiveUncertainty

Rows = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Section:
    """Rows of text with a heading and a caption."""

    title: str
    caption: str
    rows: Rows

    def table(self) -> Table:
        table = Table(title=self.title, caption=self.caption)
        table.add_column("network")
        for heading in next(iter(self.rows.values())):
            table.add_column(heading, justify="right")
        for name, row in self.rows.items():
            table.add_row(name, *row.values())
        return table


@dataclass(frozen=True)
class Tables:
    """Accuracy, and how well foreign images are told from test digits."""

    accuracy: Section
    separation: Section

    def print(self, console: Console) -> None:
        console.print(self.accuracy.table())
        console.print(self.separation.table())

    def write(self, path: Path, *, seed: int) -> Path:
        """Write the record; it appears under its name only when it is complete."""
        record: dict[str, Any] = {
            "command": "OMP_NUM_THREADS=1 zeromean demo",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": version("numpy"),
                "scikit-learn": version("scikit-learn"),
                "zeromean": zm.__version__,
            },
            "seed": seed,
        }
        for name, section in (("accuracy", self.accuracy), ("separation", self.separation)):
            record[name] = {"what": f"{section.title}: {section.caption}", "rows": section.rows}
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return path


def accuracy_rows(accuracies: Mapping[str, Accuracies], draws: int) -> Section:
    rows = {
        name: {
            "one sample": f"{result.one_sample.mean():.1f} ± {result.one_sample.std():.1f}",
            "mean propagation": f"{result.mean:.1f}",
            "20 samples": f"{result.twenty_samples.mean():.1f} ± {result.twenty_samples.std():.1f}",
        }
        for name, result in accuracies.items()
    }
    return Section("Test accuracy on digits, %", f"± standard deviation over {draws} draws", rows)


def separation_rows(
    uncertainties: Mapping[str, Mapping[str, PredictiveUncertainty]], num_samples: int
) -> Section:
    rows: Rows = {}
    for network, by_images in uncertainties.items():
        (_, familiar), *foreign = by_images.items()
        rows[network] = {
            name: f"{separation(familiar.predictive_entropy, some.predictive_entropy):.3f}"
            for name, some in foreign
        }
    return Section(
        "Foreign images told from test digits, AUROC",
        f"predictive entropy of {num_samples} samples, one network each",
        rows,
    )
