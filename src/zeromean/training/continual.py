"""Learning over time: which few examples of a task to keep."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from zeromean.arguments import require_choice, require_integer, require_seed, shown


def coreset(
    inputs: Tensor, size: int, *, method: Literal["random", "k-center"] = "random", seed: int = 0
) -> Tensor:
    """Indices of a few examples of a task that are kept for later, `(size,)`.

    The others train the model; what was kept refines a copy of it before it predicts. Nguyen et al.
    (2018), "Variational continual learning".

    Args:
        inputs: The inputs of the task, `(examples, *)`.
        size: How many to keep.
        method: "random", or "k-center": one after the other the example that is farthest from
            those chosen so far.
        seed: Seed of the choice, or of its first example.
    """
    inputs = _require_rows(inputs)
    size = require_integer("size", size, at_least=1)
    if size > len(inputs):
        raise ValueError(f"size must be at most the {len(inputs)} examples there are, got {size}.")
    require_choice("method", method, ("random", "k-center"))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(require_seed(seed)))
    if method == "random":
        return order[:size].to(inputs.device)
    rows = inputs.flatten(1).float()
    chosen = [int(order[0])]
    distance = _squared_distance(rows, chosen[0])
    while len(chosen) < size:
        distance[chosen] = -1.0  # Also where others are the same as one of them.
        chosen.append(int(distance.argmax()))
        distance = distance.minimum(_squared_distance(rows, chosen[-1]))
    return torch.tensor(chosen, device=inputs.device)


def _squared_distance(rows: Tensor, index: int) -> Tensor:
    return (rows - rows[index]).square().sum(1)


def _require_rows(inputs: Any) -> Tensor:
    if not isinstance(inputs, Tensor) or inputs.dim() == 0 or not len(inputs):
        raise TypeError(
            f"inputs must be a tensor with a row for each example, got {shown(inputs)}."
        )
    return inputs
