"""Noticing that the prior wins: a network that fits a constant while its KL falls."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

# Epochs in a row, and steps: at first a network may know nothing yet and still learn, and an epoch
# may be a single step.
PATIENCE = 3
FEWEST_STEPS = 30
# Part of the KL that must be gone: some of it is lost in any training that begins.
FALL = 0.1
# A constant is learned to within the noise of mini-batches.
MARGIN = 0.02


class CollapseWarning(UserWarning):
    """The data term is no better than that of a constant while the KL falls."""


class CollapseWatch:
    """Compares the data term of each epoch with the best constant's, and warns once.

    `fit` and `ElboModule` have one. In a loop of your own:

        watch = CollapseWatch()
        for epoch in range(epochs):
            for inputs, targets in batches:
                ...
                watch.add(targets, nll.item())
            watch.end_epoch(zm.kl_by_layer(model))
    """

    def __init__(self) -> None:
        self._epoch = _Epoch()
        self._kls: list[dict[str, float]] = []  # Of the last epochs no better than a constant.
        self._steps = 0  # In these.
        self._warned = False

    def add(self, targets: Tensor, nll: float) -> None:
        """Count a mini-batch with its mean negative log-likelihood."""
        self._epoch.add(targets, nll)

    def end_epoch(self, kl_by_layer: Mapping[str, Tensor | float]) -> None:
        """Compare the epoch with a constant, given the KL of every layer, and begin the next."""
        epoch, self._epoch = self._epoch, _Epoch()
        constant = epoch.constant_nll()
        if self._warned or constant is None or epoch.nll < constant - MARGIN * abs(constant):
            self._kls, self._steps = [], 0
            return
        self._steps += epoch.steps
        self._kls.append(
            {n: kl.item() if isinstance(kl, Tensor) else kl for n, kl in kl_by_layer.items()}
        )
        before, now = self._kls[0], self._kls[-1]
        if len(self._kls) <= PATIENCE or self._steps < FEWEST_STEPS:
            return
        fell = sum(before.values()) - sum(now.values())
        if fell <= FALL * abs(sum(before.values())):
            return
        self._warned = True
        layer = max(now, key=lambda name: before.get(name, 0.0) - now[name])
        warnings.warn(
            f"The prior is winning: for {len(self._kls)} epochs the data term has been no better "
            f"than that of a constant prediction ({epoch.nll:.3g} against {constant:.3g} nats an "
            f"example), while the KL fell from {sum(before.values()):.3g} to "
            f"{sum(now.values()):.3g}, most of all in layer {layer or 'the model'}. Let the "
            "weight of the KL rise over the first part of the training (kl_warmup_epochs, "
            "zm.linear_warmup), start from a trained network, or make the layers narrower for as "
            "few data.",
            CollapseWarning,
            stacklevel=2,
        )


class _Epoch:
    """What an epoch has shown so far: its data term, and what its best constant would have had."""

    def __init__(self) -> None:
        self.count = self.steps = 0
        self.nll_sum = 0.0
        self.classes = torch.zeros(0)
        self.sums: tuple[Tensor, Tensor] | None = None

    def add(self, targets: Tensor, nll: float) -> None:
        targets = targets.detach().cpu()
        self.count += len(targets)
        self.steps += 1
        self.nll_sum += nll * len(targets)
        if targets.is_floating_point():
            values = targets.double().flatten(1) if targets.dim() > 1 else targets.double()[:, None]
            new = values.sum(0), values.square().sum(0)
            self.sums = new if self.sums is None else (self.sums[0] + new[0], self.sums[1] + new[1])
        elif targets.numel() and targets.min() >= 0:
            counts = torch.bincount(targets.flatten())
            size = max(len(counts), len(self.classes))
            padded = [
                torch.nn.functional.pad(c, (0, size - len(c))) for c in (self.classes, counts)
            ]
            self.classes = padded[0] + padded[1]

    @property
    def nll(self) -> float:
        return self.nll_sum / max(self.count, 1)

    def constant_nll(self) -> float | None:
        """Entropy of the classes, or that of a normal distribution with the targets' variances.

        None where there is nothing to learn: a constant is right already.
        """
        if self.sums is not None:
            first, second = (total / self.count for total in self.sums)
            variance = second - first.square()
            if not (variance > 1e-12 * second).all():
                return None
            return 0.5 * (2 * math.pi * math.e * variance).log().sum().item()
        shares = self.classes[self.classes > 0] / self.classes.sum()
        return None if len(shares) < 2 else -torch.xlogy(shares, shares).sum().item()
