"""Rows of numbers from a file of one's own: .npz, .npy or .csv. Nothing is unpickled."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ENDINGS = (".npz", ".npy", ".csv")
_NUMBERS = "fiub"  # Kinds of numpy's types: floating, integers, unsigned ones, booleans.
_AT_ONCE = 2**22
_BEGINNINGS = {".npy": b"\x93NUMPY", ".npz": b"PK"}


def read_rows(path: Path, key: str | None = None, columns: Sequence[str] = ()) -> np.ndarray:
    """An array with the examples along its first dimension, checked.

    Args:
        key: Which array of an .npz; needed where it has several.
        columns: Which columns of a .csv, by name or by number from 0 on; none: all of them.
    """
    if path.suffix not in ENDINGS:
        raise ValueError(f"{path} must end in {', '.join(ENDINGS)}.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    if key is not None and path.suffix != ".npz":
        raise ValueError(f"--key chooses an array of an .npz, which {path} is not; leave it out.")
    if columns and path.suffix != ".csv":
        raise ValueError(f"--columns chooses columns of a .csv, which {path} is not; leave it out.")
    array = _read_csv(path, columns) if path.suffix == ".csv" else _read_numpy(path, key)
    name = f"{path}[{key}]" if key else str(path)
    if array.dtype.kind not in _NUMBERS:
        raise ValueError(f"{name} holds {array.dtype}, not real numbers.")
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{name} has the shape {array.shape}; it must hold at least one row.")
    _require_finite(name, array)
    return array


def _read_numpy(path: Path, key: str | None) -> np.ndarray:
    try:
        with path.open("rb") as file:
            beginning = file.read(len(_BEGINNINGS[path.suffix]))
            if beginning != _BEGINNINGS[path.suffix]:
                raise ValueError("it does not begin like one")  # numpy would take it for a pickle.
            if path.suffix == ".npy":  # Memory is only taken for the rows in use.
                return np.load(path, mmap_mode="r", allow_pickle=False)
            file.seek(0)
            with np.load(file, allow_pickle=False) as loaded:
                names = loaded.files
                if key is None and len(names) == 1:
                    key = names[0]
                array = loaded[key] if key in names else None
    except Exception as error:  # Damages end in errors of every kind: of zip, of zlib, of numpy.
        reason = " ".join(str(error).split()) or type(error).__name__
        if "pickle" in reason or "Python objects" in reason:
            reason = "it holds Python objects, which could run code; save an array of numbers"
        raise ValueError(f"{path} cannot be read as {path.suffix}: {reason}.") from error
    if array is None:
        there = f"it has {', '.join(names)}" if names else "it is empty"
        if key is None:
            raise ValueError(f"{path} has several arrays or none ({there}); choose by --key.")
        raise ValueError(f"{path} has no array {key!r}; {there}.")
    return array


def _read_csv(path: Path, columns: Sequence[str]) -> np.ndarray:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first_line = file.readline()
        delimiter = max(",;\t", key=first_line.count)
        first = next(csv.reader([first_line], delimiter=delimiter), [])
        is_header = not all(map(_is_number, first))
        used = _chosen(path, columns, first if is_header else None, len(first))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # An empty file is refused by its shape.
            table = np.loadtxt(
                path,
                delimiter=delimiter,
                skiprows=int(is_header),
                usecols=used,
                ndmin=2,
                comments=None,
                quotechar='"',
                encoding="utf-8-sig",
            )
        if len(table) and used is None and table.shape[1] != len(first):
            raise ValueError(f"its header has {len(first)} cells, its rows {table.shape[1]}")
        return table
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error}).") from error
    except ValueError as error:
        if str(path) in str(error):
            raise
        reason = str(error).split(";")[0].rstrip(".")
        raise ValueError(
            f"{path} is not a table of numbers: {reason}; --columns chooses the columns that hold "
            "numbers."
        ) from error


def _chosen(
    path: Path, columns: Sequence[str], header: list[str] | None, count: int
) -> list[int] | None:
    """Numbers of the columns that are to be read; None for all."""
    names = [name.strip() for name in header or []]
    chosen = []
    for column in columns:
        if column in names:
            chosen.append(names.index(column))
        elif column.isdecimal() and int(column) < count:
            chosen.append(int(column))
        else:
            there = ", ".join(names) if names else f"0 to {count - 1}"
            raise ValueError(f"{path} has no column {column!r}; it has {there}.")
    return chosen or None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _require_finite(name: str, array: np.ndarray) -> None:
    if array.dtype.kind != "f":
        return
    rows_at_once = max(1, _AT_ONCE // max(array[0].size, 1))
    wrong: list[Any] = []
    for start in range(0, len(array), rows_at_once):
        finite = np.isfinite(array[start : start + rows_at_once])
        rows = np.flatnonzero(~finite.reshape(len(finite), -1).all(axis=1))
        wrong.extend(start + rows)
    if wrong:
        raise ValueError(
            f"{name} holds NaN or infinite values in {len(wrong):,} of {len(array):,} rows, first "
            f"in row {wrong[0]} (counted from 0); clean or impute them."
        )
