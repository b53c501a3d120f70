"""Weights on a grid: whole multiples of one step, for a tensor or for each of its rows.

`zm.quantize_` makes such weights, and so do other tools for ternary or integer weights. Rows stay
on a grid, each with a step of its own, when a BatchNorm is folded in, and when units are removed.
The steps are not stored with the model: they are found from the values.
"""

from __future__ import annotations

import numpy as np
import torch

# A largest weight of 2^bits − 1 steps is the rule; others come about where it has been removed.
# With more than 16 bits numbers would hardly be shorter than float32.
_USUAL = tuple(sorted({*range(1, 64), *(2**bits - 1 for bits in range(16))} - {0}))
_OTHERS = tuple(n for n in range(64, 1024) if n not in _USUAL)
_FEW = 256
_ROUNDING = 4 * np.finfo(np.float64).eps  # of the bounds themselves


def find_grids(
    rows: np.ndarray, dtype: torch.dtype, *, loose: bool
) -> tuple[np.ndarray, ...] | None:
    """Multiples `(groups, weights)` and float32 steps `(groups,)`; None where there is no grid.

    Args:
        rows: The values `(groups, weights)` in float64.
        dtype: The type that they come from.
        loose: Be content with what is within two roundings of the values, where they have been
            multiplied since. Otherwise multiples of the steps, rounded, are the values.
    """
    multiples = np.zeros(rows.shape, dtype=np.int64)
    steps = np.zeros(len(rows), dtype=np.float32)
    magnitudes = np.abs(rows)
    counts = np.count_nonzero(rows, axis=1)
    pending = np.flatnonzero(counts)
    if not len(pending):
        return multiples, steps
    # The fullest rows fail first: most tensors are on no grid, and should not take long.
    for row in pending[np.argsort(-counts[pending])[:3]]:
        if not _has_grid(magnitudes[row], dtype, loose):
            return None
    for candidates in (_USUAL, _OTHERS):
        if candidates is _OTHERS and len(pending):
            if not _has_grid(magnitudes[pending[0]], dtype, loose):
                return None
        for largest in candidates:
            if not len(pending):
                return multiples, steps
            found = pending[_fits(_sample(magnitudes[pending]), largest, dtype, loose)[2]]
            if not len(found):
                continue
            numbers, step, fits = _fits(magnitudes[found], largest, dtype, loose)
            multiples[found[fits]] = numbers[fits]
            steps[found[fits]] = step[fits]
            pending = np.setdiff1d(pending, found[fits], assume_unique=True)
    if len(pending):
        return None
    return multiples, steps


def signed(rows: np.ndarray, multiples: np.ndarray) -> np.ndarray:
    """Multiples with the signs of the values."""
    return np.where(rows < 0, -multiples, multiples)


def _has_grid(row: np.ndarray, dtype: torch.dtype, loose: bool) -> bool:
    values = _sample(row[None])
    every = np.array((*_USUAL, *_OTHERS))
    return bool(_fits(np.repeat(values, len(every), 0), every[:, None], dtype, loose)[2].any())


def _sample(magnitudes: np.ndarray) -> np.ndarray:
    """Some of the columns, and the largest of every row, to which all others are compared."""
    if magnitudes.shape[1] <= _FEW:
        return magnitudes
    columns = np.linspace(0, magnitudes.shape[1] - 1, _FEW).astype(np.int64)
    nonzero = np.flatnonzero(magnitudes[0])
    columns = np.union1d(columns, nonzero[:: max(len(nonzero) // _FEW, 1)])
    return np.concatenate([magnitudes.max(1, keepdims=True), magnitudes[:, columns]], 1)


def _fits(
    magnitudes: np.ndarray, largest: int | np.ndarray, dtype: torch.dtype, loose: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Multiples and steps if the largest of every row is so many steps, and whether that is so.

    A value stands for an interval of numbers that are rounded to it, and so for an interval of
    steps. Some float32 must be in the intervals of all values.
    """
    top = magnitudes.max(1, keepdims=True)
    numbers = np.rint(magnitudes * (largest / top))
    # Two roundings, or half a unit in the last place, where ties may go either way.
    eps = torch.finfo(dtype).eps
    half = magnitudes * (2 * eps) if loose else _half_unit(magnitudes, eps)
    used = magnitudes > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(used, (magnitudes - half) / numbers, 0.0).max(1)
        high = np.where(used, (magnitudes + half) / numbers, np.inf).min(1)
        steps = (0.5 * (low + high)).astype(np.float32)
    wide = steps.astype(np.float64)
    low, high = low * (1 - _ROUNDING), high * (1 + _ROUNDING)
    fits = np.isfinite(wide) & (wide > 0) & (low <= wide) & (wide <= high)
    fits &= (~used | (numbers > 0)).all(1)
    if not loose and fits.any():
        made = torch.from_numpy(numbers[fits] * wide[fits, None]).to(dtype).double().numpy()
        fits[fits] = (made == magnitudes[fits]).all(1)
    return numbers.astype(np.int64), steps, fits


def _half_unit(magnitudes: np.ndarray, eps: float) -> np.ndarray:
    _, exponents = np.frexp(magnitudes)
    return np.ldexp(0.25 * eps, exponents)
