"""Held-out examples, whole in memory: what a choice is made on and what it is reported on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from zeromean.prediction.inputs import as_arguments, num_examples_in
from zeromean.training.data_sources import (
    Data,
    as_image_set,
    evaluation_batches,
    require_data,
)
from zeromean.training.mini_batches import split_batch

# Fewer cannot be divided into a part to choose by and a part to report on.
FEWEST = 20


@dataclass(frozen=True)
class Examples:
    """Inputs (a tensor, or a tuple or mapping of arguments) and their targets."""

    inputs: Any
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, index: Tensor) -> Examples:
        # What has no row for each example (a mask for all) is the same for every part.
        count = len(self)
        inputs = tree_map_only(
            Tensor, lambda t: t[index] if t.dim() and len(t) == count else t, self.inputs
        )
        return Examples(inputs, self.targets[index])

    def to(self, device: torch.device) -> Examples:
        return Examples(moved(self.inputs, device), self.targets.to(device))

    def first(self, count: int) -> Examples:
        return self.subset(torch.arange(min(count, len(self))))

    def halves(self, seed: int) -> tuple[Examples, Examples]:
        """Two parts at random: one to choose by, and one to report on."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        one, other = (part.sort().values for part in order.tensor_split(2))
        return self.subset(one), self.subset(other)


def moved(value: Any, device: torch.device) -> Any:
    """The same with all its tensors on a device."""
    return tree_map_only(Tensor, lambda t: t.to(device), value)


def held_out(name: str, data: Data) -> Examples:
    """All examples of a set that is only looked at."""
    require_data(name, data)
    tensors = as_image_set(data)
    if tensors is not None:
        found = Examples(tensors.images, tensors.labels)
    else:
        pairs = [split_batch(batch) for batch in evaluation_batches(data)]
        if not pairs:
            raise ValueError(f"{name} has no batches; it needs at least {FEWEST} examples.")
        inputs = _joined(name, [part for part, _ in pairs])
        found = Examples(inputs, torch.cat([targets for _, targets in pairs]))
    if len(found) < FEWEST:
        raise ValueError(
            f"{name} needs at least {FEWEST} examples, half to choose by and half to report on, "
            f"got {len(found)}."
        )
    return found


def foreign_inputs(data: Any) -> Any:
    """Inputs of foreign data: given as they are, or with targets that nobody asks for."""
    if isinstance(data, (Tensor, Mapping)):
        return data
    tensors = as_image_set(data)
    return held_out("foreign", data).inputs if tensors is None else tensors.images


def _joined(name: str, parts: list[Any]) -> Any:
    """Batches of inputs as one."""
    leaves, structure = tree_flatten(parts[0])
    columns = [tree_flatten(part)[0] for part in parts]
    joined = []
    for place, leaf in enumerate(leaves):
        column = [row[place] for row in columns]
        sizes = [num_examples_in(*as_arguments(part)) for part in parts]
        by_example = isinstance(leaf, Tensor) and all(
            t.dim() and len(t) == size for t, size in zip(column, sizes, strict=True)
        )
        if not by_example:
            joined.append(leaf)
            continue
        if len({tuple(t.shape[1:]) for t in column}) > 1:
            raise ValueError(
                f"The batches of {name} must be of one shape to be predicted together, got "
                f"{tuple(column[0].shape)} and others; pad them alike."
            )
        joined.append(torch.cat(column))
    return tree_unflatten(joined, structure)
