"""Predictions as files, .npz or .csv, and as a short table of text."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zeromean.files.atomic import whole_file
from zeromean.text_table import text_table

ENDINGS = (".npz", ".csv")


def require_place(path: Path, inputs: tuple[Path, ...]) -> None:
    """Find out before the work, not after it, that a file cannot be written."""
    if path.suffix not in ENDINGS:
        raise ValueError(f"--out must end in {' or '.join(ENDINGS)}, got {path}.")
    if any(path.exists() and each.exists() and path.samefile(each) for each in inputs):
        raise ValueError(f"--out {path} is one of the files that are read; choose another.")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"--out {path} cannot be written: it must be a file in a folder that exists."
        )


def require_fitting(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Refuse a .csv for what has more than one number a row and name."""
    for name, values in columns.items():
        if path.suffix == ".csv" and values.ndim > 2:
            raise ValueError(
                f"{name} has the shape {values.shape[1:]} for each row, which a .csv cannot hold; "
                "give --out a name that ends in .npz."
            )


def write(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """A file that is there when it is complete, and not before."""
    with whole_file(path) as temporary:
        if path.suffix == ".npz":
            with temporary.open("wb") as file:
                arrays: dict[str, Any] = dict(columns)
                np.savez(file, **arrays)
            return
        flat = _flat(columns)
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["row", *flat])
            # As text, numbers are as short as they can be without loss.
            cells = [values.astype(str) for values in flat.values()]
            writer.writerows([row, *each] for row, each in enumerate(zip(*cells, strict=True)))


def most_uncertain(columns: Mapping[str, np.ndarray], by: str, count: int) -> list[str]:
    """Lines of a table of the rows where a column is largest, on average over a row's numbers."""
    score = _by_row(columns[by])
    chosen = np.argsort(-score, kind="stable")[:count]
    shown = {name: _by_row(values) for name, values in columns.items() if name != "probabilities"}
    if "predicted_class" in shown and columns["predicted_class"].ndim == 1:
        shown["probability"] = columns["probabilities"].max(axis=-1)
    lines = [("row", *(name.replace("_", " ") for name in shown))]
    for row in chosen:
        cells = (values[row] for values in shown.values())
        lines.append((f"{row}", *(f"{cell:.4g}" for cell in cells)))
    return text_table(lines)


def _flat(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A column for every number of a row: probability_0, probability_1, …"""
    flat = {}
    for name, values in columns.items():
        if values.ndim == 1:
            flat[name] = values
        elif values.shape[1] == 1:
            flat[name] = values[:, 0]
        else:
            one = "probability" if name == "probabilities" else name
            flat |= {f"{one}_{index}": values[:, index] for index in range(values.shape[1])}
    return flat


def _by_row(values: np.ndarray) -> np.ndarray:
    return values if values.ndim == 1 else values.reshape(len(values), -1).mean(axis=1)
