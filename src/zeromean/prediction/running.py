"""Means and variances over samples that come in chunks."""

from __future__ import annotations

import torch
from torch import Tensor


class _Running:
    """Mean and, with `spread`, variance over samples that arrive in chunks `(k, …)`.

    Memory is constant, unless the samples themselves are to be kept.
    """

    def __init__(self, *, spread: bool = False, keep: bool = False):
        self.spread = spread
        self.count = 0
        self.mean = torch.zeros((), device="cpu")
        self.squares = torch.zeros((), device="cpu")
        self.chunks: list[Tensor] | None = [] if keep else None

    def update(self, chunk: Tensor) -> None:
        # Thousands of small steps in half precision would add up to an error in the first digits.
        chunk = chunk if chunk.dtype == torch.float64 else chunk.float()
        if self.chunks is not None:
            self.chunks.append(chunk)
        # Chan et al. (1983): merge two sets by their counts, means and sums of squares.
        size, mean = len(chunk), chunk.mean(0)
        squares = (chunk - mean).square().sum(0) if self.spread else self.squares
        if self.count == 0:
            self.count, self.mean, self.squares = size, mean, squares
            return
        total = self.count + size
        delta = mean - self.mean
        self.mean = self.mean + delta * (size / total)
        if self.spread:
            self.squares = self.squares + squares + delta.square() * (self.count * size / total)
        self.count = total

    def variance(self) -> Tensor:
        return self.squares / (self.count - 1)

    def stderr(self) -> Tensor:
        return (self.variance() / self.count).sqrt()

    def kept(self) -> Tensor:
        return torch.cat(self.chunks or [])
