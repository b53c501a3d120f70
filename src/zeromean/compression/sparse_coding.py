"""Sparse tensors in few bytes: the values, and the distances between them.

The distance from one value to the next, less one, is written as bytes that add up to it: as many
255 as fit, and the rest. At the sparsity of a pruned network that is little more than one byte for
a value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def encode(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The non-zero values of a tensor in order, and the bytes that say where they stand."""
    flat = tensor.detach().flatten()
    places = flat.nonzero().flatten()
    before = torch.cat([places.new_tensor([-1]), places[:-1]])
    gaps = places - before - 1
    numbers = gaps // 255 + 1  # bytes of every gap
    steps = torch.full((int(numbers.sum()),), 255, dtype=torch.uint8, device=flat.device)
    steps[numbers.cumsum(0) - 1] = (gaps % 255).to(torch.uint8)
    return flat[places], steps


def decode(values: Tensor, steps: Tensor, shape: torch.Size) -> Tensor:
    """The tensor that was encoded. Raises ValueError where values and places do not fit."""
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


def size(tensor: Tensor) -> int:
    """Bytes of a tensor, coded where that pays."""
    return _coded_size(tensor) if pays(tensor) else tensor.nbytes


def _coded_size(tensor: Tensor) -> int:
    values, steps = encode(tensor)
    return values.nbytes + steps.nbytes
