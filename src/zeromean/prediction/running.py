"""Means and variances over samples that come in chunks, from one network or several."""

from __future__ import annotations

import torch
from torch import Tensor


class Running:
    """Mean and, with `spread`, variance over samples that arrive in chunks `(k, …)`.

    Networks count alike, and as many samples come from each. They are what is given, and their
    noise is what is drawn: standard errors are those of the noise, as in stratified sampling.
    Memory is constant, unless the samples themselves are to be kept.
    """

    def __init__(self, *, spread: bool = False, keep: bool = False):
        self.spread = spread
        self.chunks: list[Tensor] | None = [] if keep else None
        # Of the networks that have ended: their means' mean and sum of squares, and the sum of
        # the variances within them.
        self.num_networks = self.num_samples = 0
        self.mean = self._between = self._within = torch.zeros((), device="cpu")
        self._begin_network()

    def _begin_network(self) -> None:
        self._count = 0
        self._mean = self._squares = torch.zeros((), device="cpu")

    def update(self, chunk: Tensor) -> None:
        # Thousands of small steps in half precision would add up to an error in the first digits.
        chunk = chunk if chunk.dtype == torch.float64 else chunk.float()
        if self.chunks is not None:
            self.chunks.append(chunk)
        # Chan et al. (1983): merge two sets by their counts, means and sums of squares.
        size, mean = len(chunk), chunk.mean(0)
        squares = (chunk - mean).square().sum(0) if self.spread else self._squares
        if self._count == 0:
            self._count, self._mean, self._squares = size, mean, squares
            return
        total = self._count + size
        delta = mean - self._mean
        self._mean = self._mean + delta * (size / total)
        if self.spread:
            self._squares = self._squares + squares + delta.square() * (self._count * size / total)
        self._count = total

    def end_network(self) -> None:
        """End a network: the samples that come next are those of another one."""
        self.num_networks += 1
        self.num_samples = self._count
        within = self._squares / max(self._count - 1, 1)
        if self.num_networks == 1:
            self.mean, self._within = self._mean, within
        else:
            delta = self._mean - self.mean
            self.mean = self.mean + delta / self.num_networks
            self._between = self._between + delta * (self._mean - self.mean)
            self._within = self._within + within
        self._begin_network()

    def variance(self) -> Tensor:
        """The variance of the mixture of all networks, whose estimate has no bias."""
        if self.num_networks == 1:
            return self._within
        # The means of the networks vary with the noise too, which is counted once.
        once = 1 - (1 - 1 / self.num_networks) / self.num_samples
        return (self._between + once * self._within) / self.num_networks

    def stderr(self) -> Tensor:
        return (self._within / self.num_samples).sqrt() / self.num_networks

    def kept(self) -> Tensor:
        return torch.cat(self.chunks or [])

    def stderr_of(self, values: Tensor) -> Tensor:
        """The standard error of the average of values for every sample."""
        by_network = values.unflatten(0, (self.num_networks, self.num_samples))
        return (by_network.var(1).sum(0) / self.num_samples).sqrt() / self.num_networks
