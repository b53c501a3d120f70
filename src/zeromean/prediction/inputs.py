"""What a prediction is asked for: tensors, dicts of them, or loaders, in batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from zeromean.arguments import FLOATING, shown

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
InputsOrLoader = Inputs | DataLoader[Any]


def _batches(inputs: InputsOrLoader, batch_size: int | None) -> list[tuple[tuple, dict[str, Any]]]:
    """The arguments of the calls that one sample takes, checked."""
    if isinstance(inputs, DataLoader):
        if batch_size is not None:
            raise ValueError("A DataLoader has batches of its own; leave batch_size= out.")
        batches = _batches_of(inputs)
    else:
        batches = [as_arguments(inputs)]
    for args, kwargs in batches:
        _require_finite_inputs((*args, *kwargs.values()))
    return batches if batch_size is None else _split(batches[0], batch_size)


def _batches_of(loader: DataLoader[Any]) -> list[tuple[tuple, dict[str, Any]]]:
    """Arguments for every batch of a loader, which is read once: each sample needs all of them."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    shuffling = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    if any(isinstance(s, shuffling) or getattr(s, "shuffle", False) for s in samplers):
        raise ValueError(
            "The DataLoader gives its examples in random order, so that predictions could not be "
            "matched to them; build it with shuffle=False."
        )
    batches = []
    for batch in loader:
        inputs = batch
        if isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence):
            if len(batch) not in (1, 2):
                raise ValueError(
                    "A DataLoader must give inputs, (inputs, targets) or a mapping of keyword "
                    f"arguments, got {len(batch)} things a batch; predict batch by batch, with a "
                    "tuple of the model's arguments as inputs."
                )
            inputs = batch[0]
        batches.append(as_arguments(inputs))
    if not batches:
        raise ValueError("The DataLoader is empty; there is nothing to predict.")
    return batches


def logits_in(output: Any) -> Any:
    """The tensor called logits, where a model returns several things under names."""
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else None
    found = getattr(output, "logits", None) if found is None else found
    return found if isinstance(found, Tensor) else output


def _described(output: Any) -> str:
    """A class by its name, with the names of what is in it."""
    names: Any = getattr(output, "_fields", ())
    if isinstance(output, Mapping):
        names = output
    elif dataclasses.is_dataclass(output):
        names = [field.name for field in dataclasses.fields(output)]
    inside = ", ".join(map(str, names))
    return f"{type(output).__name__} of {inside}" if inside else type(output).__name__


def _split(
    arguments: tuple[tuple, dict[str, Any]], batch_size: int
) -> list[tuple[tuple, dict[str, Any]]]:
    """Arguments for at most so many examples at a time, which lie along dimension 0."""
    if any(isinstance(value, PackedSequence) for value in (*arguments[0], *arguments[1].values())):
        raise ValueError("batch_size cannot split a PackedSequence; split the sequences first.")
    count = num_examples_in(*arguments)

    def part(start: int) -> Any:
        here = slice(start, start + batch_size)
        # A tensor without a row for each example (one mask for all) goes to every batch as it is.
        return tree_map_only(
            Tensor, lambda t: t[here] if t.dim() and len(t) == count else t, arguments
        )

    return [part(start) for start in range(0, max(count, 1), batch_size)]


def num_examples_in(args: tuple, kwargs: dict[str, Any]) -> int:
    """How many examples there are, by the first tensor that has dimensions."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
    if not tensors:
        raise ValueError("inputs must hold a tensor with the examples along dimension 0, got none.")
    return len(tensors[0])


def as_arguments(inputs: Inputs) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of the model."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return inputs, {}
    if inputs is None or isinstance(inputs, str | bytes | Number | set | type):
        raise TypeError(
            "inputs must be a tensor, a tuple of positional or a mapping of keyword arguments, got "
            f"{shown(inputs)}."
        )
    if isinstance(inputs, list | np.ndarray):
        raise TypeError(
            "inputs must be a tensor, a tuple of positional or a mapping of keyword arguments, got "
            f"{type(inputs).__name__}; use torch.as_tensor(inputs), or a tuple for several "
            "arguments."
        )
    return (inputs,), {}


def _require_finite_inputs(values: tuple) -> None:
    for value in tree_leaves(values):
        if not isinstance(value, Tensor) or value.dtype not in FLOATING:
            continue  # float8 cannot be asked; what takes it, or refuses it, is the model.
        wrong = value.isnan() | value.isposinf()  # −∞ is what masks of attention are made of.
        if wrong.any():
            raise ValueError(
                f"The input must be finite, got {int(wrong.sum())} NaN or infinite values in a "
                f"tensor of shape {tuple(value.shape)}; clean or impute them."
            )
