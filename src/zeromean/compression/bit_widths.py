"""The fewest bits that round weights within a tolerance, given in their standard deviations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeromean.compression.candidates import LOG_ALPHA_THRESHOLD


def fewest_bits(
    mean: Tensor,
    std: Tensor,
    keep: Tensor,
    *,
    each: bool,
    tolerance: float,
    widths: range | tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounded values, their widths and errors in standard deviations, all `(groups, weights)`.

    Args:
        each: Choose the width of each weight, not of each group.
    """
    count = num_readable(mean, std, keep)
    values, chosen = torch.zeros_like(mean), torch.zeros_like(mean, dtype=torch.int64)
    deviations = torch.zeros_like(mean)
    rough = torch.ones_like(keep)
    for width in widths:
        rounded = on_grid(mean, keep, width)
        error = torch.where(keep, rounded - mean, 0.0)
        deviation = torch.where(error == 0, 0.0, error / std)
        values = torch.where(rough, rounded, values)
        chosen = torch.where(rough, width, chosen)
        deviations = torch.where(rough, deviation, deviations)
        if each:
            rough = deviations.abs() > tolerance
        else:
            rms = (deviations.square().sum(1, keepdim=True) / count).sqrt()
            rough = (rms > tolerance).expand_as(keep)
        if not rough.any():
            break
    return values, chosen, deviations


def num_readable(mean: Tensor, std: Tensor, keep: Tensor) -> Tensor:
    """How many weights of each group, `(groups, 1)`, are more than noise: at least one."""
    readable = std.square() <= math.exp(LOG_ALPHA_THRESHOLD) * mean.square()
    return (readable & keep).sum(1, keepdim=True).clamp_min(1)


def on_grid(mean: Tensor, keep: Tensor, width: int) -> Tensor:
    """Every group on its symmetric grid; pruned weights do not count.

    Steps are float32, as they are in a file.
    """
    magnitude = torch.where(keep, mean.abs(), 0.0)
    if width == 1:
        average = magnitude.sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp_min(1)
        average = average.float().double()
        return torch.where(mean < 0, -average, average)
    step = (magnitude.amax(1, keepdim=True) / (2 ** (width - 1) - 1)).float().double()
    return torch.where(step > 0, (mean / step).round() * step, 0.0)
