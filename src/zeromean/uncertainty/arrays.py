"""Arrays from anywhere: checked, and turned into float64 tensors on the CPU.

Metrics take tensors, numpy arrays and lists, of any floating-point type and on any device. What is
wrong with them is said in one sentence, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from zeromean.arguments import require_integer, require_numbers, shown

ArrayLike = Tensor | np.ndarray | Sequence[Any]
Array = TypeVar("Array", Tensor, np.ndarray)

# How far from 1 a sum of probabilities may be: they may come from half precision or a text file.
_SLACK = 1e-3


def as_tensor(name: str, values: Any) -> Tensor:
    """A tensor of real numbers on the CPU, without its graph."""
    if not isinstance(values, Tensor):
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            raise TypeError(f"{name} must be a tensor or an array, got {shown(values)}.")
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{name} must be an array of numbers, got {shown(values)}.")
        # torch has no long doubles, and takes no negative strides.
        array = array.astype(np.float64) if array.dtype.kind == "f" else array
        values = torch.from_numpy(np.ascontiguousarray(array))
    if values.is_complex():
        raise TypeError(f"{name} must be real numbers, got {shown(values)}.")
    return values.detach().cpu()


def like(result: Tensor, given: Any) -> Any:
    """A result as what it was made from: a tensor there, in its type, or a numpy array."""
    if isinstance(given, Tensor):
        dtype = given.dtype if given.is_floating_point() and result.is_floating_point() else None
        return result.to(device=given.device, dtype=dtype)
    if isinstance(given, np.ndarray) and given.dtype.kind == "f" and result.is_floating_point():
        return result.numpy().astype(given.dtype)
    return result.numpy()


def as_numbers(name: str, values: Any, *, dims: int | None = None) -> Tensor:
    """Finite numbers in float64; of so many dimensions, where that is asked for."""
    numbers = as_tensor(name, values).double()
    _refuse_nan(name, numbers)
    if numbers.isinf().any():
        raise ValueError(f"{name} must be finite, got {_count(numbers.isinf())} infinite values.")
    if dims is not None and numbers.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got {shown(values)}.")
    return numbers


def as_scores(name: str, values: Any) -> Tensor:
    """One number an example in float64, infinity included, as a row."""
    scores = as_tensor(name, values).double().flatten()
    _refuse_nan(name, scores)
    if not len(scores):
        raise ValueError(f"{name} must have at least one score, got {shown(values)}.")
    return scores


def as_probabilities(values: Any, name: str = "probabilities") -> Tensor:
    """Probabilities `(examples, classes)` that sum to 1, in float64."""
    given = as_tensor(name, values)
    if given.dim() != 2 or given.shape[1] < 2:
        hint = ""
        if given.dim() == 3:
            hint = "; average samples first: samples.mean(0)"
        elif given.dim() == 1 or given.shape[1:] == (1,):
            hint = "; stack those of no and yes: stack([1 - p, p], -1)"
        raise ValueError(
            f"{name} must have the shape (examples, classes), got {tuple(given.shape)}{hint}."
        )
    return _checked(given, name)


def as_samples(values: Any, name: str = "samples") -> Tensor:
    """Probabilities of several draws, `(num_samples, examples, classes)`, in float64."""
    given = as_tensor(name, values)
    if given.dim() != 3 or given.shape[2] < 2 or not given.shape[0]:
        hint = "; for one prediction pass probabilities[None]" if given.dim() == 2 else ""
        raise ValueError(
            f"{name} must have the shape (num_samples, examples, classes), got "
            f"{tuple(given.shape)}{hint}."
        )
    return _checked(given, name)


def as_labels(values: Any, like: Tensor, name: str = "labels") -> Tensor:
    """Classes of the examples that probabilities are of, in int64."""
    num_examples, num_classes = like.shape[-2:]
    given = as_tensor(name, values)
    if given.dtype == torch.bool or given.is_floating_point():
        raise TypeError(
            f"{name} must be classes, whole numbers, got {shown(values)}; use an integer type."
        )
    if given.dim() != 1:
        hint = "; use labels.argmax(-1)" if given.shape == like.shape else ""
        raise ValueError(
            f"{name} must have one dimension, one class an example, got shape "
            f"{tuple(given.shape)}{hint}."
        )
    if len(given) != num_examples:
        raise ValueError(
            f"There must be a label for each of {num_examples} examples, got {len(given)} {name}."
        )
    low, high = int(given.min()), int(given.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"{name} must be classes from 0 to {num_classes - 1}, as many as there are "
            f"probabilities, got {low} to {high}."
        )
    return given.long()


def require_fraction(name: str, value: Any, *, ends: str = "(]") -> float:
    """A number between 0 and 1; `ends` says which of them it may be."""
    require_numbers(**{name: value})
    low = value >= 0 if ends[0] == "[" else value > 0
    high = value <= 1 if ends[1] == "]" else value < 1
    if not (low and high):
        raise ValueError(f"{name} must lie in {ends[0]}0, 1{ends[1]}, got {value}.")
    return float(value)


def require_count(name: str, value: Any) -> int:
    return require_integer(name, value, at_least=1)


def _checked(given: Tensor, name: str) -> Tensor:
    if not given.is_floating_point():
        raise TypeError(f"{name} must be floating-point numbers, got {shown(given)}.")
    if not given.shape[-2]:
        raise ValueError(f"{name} must be of at least one example, got shape {tuple(given.shape)}.")
    numbers = given.double()
    _refuse_nan(name, numbers)
    low = float(numbers.min())
    sums = numbers.sum(-1)
    if low < -1e-6:
        raise ValueError(
            f"{name} must not be negative, got {low:.4g}; logits become probabilities by "
            "softmax(-1)."
        )
    furthest = float(sums.flatten()[(sums - 1).abs().argmax()])
    if abs(furthest - 1) > max(_SLACK, 16 * torch.finfo(given.dtype).eps):
        raise ValueError(
            f"{name} must sum to 1 over the classes, got a sum of {furthest:.4g}; logits become "
            "probabilities by softmax(-1)."
        )
    return numbers.clamp_min(0)


def _refuse_nan(name: str, numbers: Tensor) -> None:
    missing = numbers.isnan()
    if missing.any():
        raise ValueError(f"{name} must be numbers, got {_count(missing)} NaN.")


def _count(mask: Tensor) -> str:
    return f"{int(mask.sum()):,}"
