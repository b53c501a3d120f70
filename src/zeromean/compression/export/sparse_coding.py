"""Sparse tensors in few bytes: the values, and the distances between them.

The distance from one value to the next, less one, is written as bytes that add up to it: as many
255 as fit, and the rest. At the sparsity of a pruned network that is little more than one byte for
a value. Zeros behind the last value are written as 255s too, so that the bytes of a code bound the
size of its tensor, and a short file cannot ask for a large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# Codes of 0.1.0 end with the last value: all the zeros behind it are not in them.
_MOST_UNCODED = 2**25


def encode(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The non-zero values of a tensor in order, and the bytes that say where they stand."""
    flat = tensor.detach().flatten()
    places = flat.nonzero().flatten()
    before = torch.cat([places.new_tensor([-1]), places[:-1]])
    gaps = places - before - 1
    numbers = gaps // 255 + 1  # bytes of every gap
    steps = torch.full((int(numbers.sum()),), 255, dtype=torch.uint8, device=flat.device)
    steps[numbers.cumsum(0) - 1] = (gaps % 255).to(torch.uint8)
    behind = flat.numel() - (int(places[-1]) + 1 if len(places) else 0)
    return flat[places], torch.cat([steps, steps.new_full((behind // 255,), 255)])


def require_plausible(shapes: Iterable[torch.Size], num_steps: int) -> None:
    """Raise ValueError where tensors are larger than codes of so many bytes can say."""
    # Without its zeros: what holds nothing can still have a billion rows.
    places = sum(math.prod(max(length, 1) for length in shape) for shape in shapes)
    if places > 256 * num_steps + _MOST_UNCODED:
        raise ValueError(f"got tensors of {places} places in a code of {num_steps} bytes")


def decode(values: Tensor, steps: Tensor, shape: torch.Size) -> Tensor:
    """The tensor that was encoded. Raises ValueError where values and places do not fit."""
    if steps.dim() != 1 or steps.dtype != torch.uint8:
        raise ValueError(f"got steps of {steps.dtype} in {steps.dim()} dimensions")
    ends = steps < 255
    places = steps.long().cumsum(0)[ends] + torch.arange(int(ends.sum()), device=steps.device)
    if values.dim() != 1 or len(places) != len(values):
        raise ValueError(f"got {len(values)} values for {len(places)} places")
    if len(places) and places[-1] >= shape.numel():
        raise ValueError(f"got a place beyond the {shape.numel()} of the tensor")
    flat = values.new_zeros(shape.numel())
    flat[places] = values
    return flat.view(shape)


def pays(tensor: Tensor) -> bool:
    """Whether the code is shorter than the tensor."""
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return False
    return _coded_size(tensor) < tensor.nbytes


def _coded_size(tensor: Tensor) -> int:
    values, steps = encode(tensor)
    return values.nbytes + steps.nbytes
