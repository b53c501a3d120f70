"""What can be pruned: the weights or neurons of a posterior, and the units of a noise module."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeromean.compression.neurons import by_neuron, from_neurons
from zeromean.distributions.posteriors.factorized import independent
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.dropout.unit_noise import SNR_THRESHOLD, UnitNoise

# log α of a weight from which on it is pruned: Molchanov et al. (2017).
LOG_ALPHA_THRESHOLD = 3.0


class PrunableWeights:
    """The weights (or the neurons) of one posterior.

    Attributes:
        excess: For each of them how little it matters; pruning takes the largest.
    """

    def __init__(self, name: str, posterior: Posterior, by: str, unit: str):
        self.name = name
        self.posterior = posterior
        self.default_threshold = LOG_ALPHA_THRESHOLD
        self.whole_neurons = unit == "neuron"
        with torch.no_grad():
            self.excess = self._minus_variance() if by == "variance" else self._log_alpha()
        _refuse_nan(name, self.excess)
        row = posterior.layout.noiseless_row
        if row is not None and not self.whole_neurons:
            noiseless = torch.arange(len(self.excess), device=posterior.device) == row
            self.excess = self.excess.masked_fill(noiseless.unsqueeze(1), -math.inf)

    def prune_(self, doomed: Tensor) -> int:
        posterior = self.posterior
        keep = ~doomed
        if self.whole_neurons:
            keep = from_neurons(keep.unsqueeze(1), posterior).clone()
        if posterior.layout.noiseless_row is not None:
            keep[posterior.layout.noiseless_row] = True  # It has no noise that could drown it.
        before = torch.ones_like(keep) if posterior.mask is None else posterior.mask
        keep &= before
        count = int(before.sum() - keep.sum())
        if count:
            posterior.mask = keep
        return count

    def is_empty(self) -> bool:
        mask = self.posterior.mask
        return mask is not None and not self.posterior.counted(mask).any()

    def _log_alpha(self) -> Tensor:
        if not self.whole_neurons:
            return independent(self.posterior, "Pruning by log α").log_alpha_per_weight()
        mean, variance = self.posterior.moments()
        assert mean is not None
        noise, signal = (
            by_neuron(t.double(), self.posterior).sum(1) for t in (variance, mean.square())
        )
        # A neuron that is pruned already, 0 / 0, has no signal; NaN stays NaN, and is refused.
        return torch.where(signal == 0, math.inf, noise / signal).log()

    def _minus_variance(self) -> Tensor:
        _, variance = self.posterior.moments()
        return -(by_neuron(variance, self.posterior).mean(1) if self.whole_neurons else variance)


class PrunableUnits:
    """The units of a noise module, with the same attributes."""

    def __init__(self, name: str, noise: UnitNoise):
        self.name = name
        self.noise = noise
        self.default_threshold = -2 * math.log(SNR_THRESHOLD)
        with torch.no_grad():
            self.excess = torch.where(noise.keep, -2 * noise.log_snr(), math.inf)
        _refuse_nan(name, self.excess)

    def prune_(self, doomed: Tensor) -> int:
        count = int((self.noise.keep & doomed).sum())
        self.noise.keep &= ~doomed
        return count

    def is_empty(self) -> bool:
        return not self.noise.keep.any()


def _refuse_nan(name: str, excess: Tensor) -> None:
    if excess.isnan().any():
        raise ValueError(
            f"{name} has NaN among its parameters, which says nothing about what to prune; go "
            "back to a sound checkpoint."
        )
