"""Noise families: zero mean, unit variance, symmetric.

Each is a function of a tensor whose shape, dtype and device the noise takes. Drawing is
out of place, from torch's global generator, so that it works under `torch.func.vmap` with
`randomness="different"` and under `torch.compile`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

NoiseFamily = Callable[[Tensor], Tensor]


def normal(like: Tensor) -> Tensor:
    """Standard normal noise."""
    return torch.randn_like(like, memory_format=torch.contiguous_format)


def rademacher(like: Tensor) -> Tensor:
    """Bernoulli noise on ±1, each with probability ½: the paper's Bernoulli variance layer."""
    return torch.randint_like(like, 2, memory_format=torch.contiguous_format).mul(2).sub(1)


def uniform(like: Tensor) -> Tensor:
    """Uniform noise on ±√3, which has unit variance; Uniform(−1, 1) would have variance ⅓."""
    half_width = math.sqrt(3.0)
    unit = torch.rand_like(like, memory_format=torch.contiguous_format)
    return unit.mul(2 * half_width).sub(half_width)


NOISES: dict[str, NoiseFamily] = {"normal": normal, "rademacher": rademacher, "uniform": uniform}
