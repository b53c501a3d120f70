"""Noise on units: random multipliers of neurons and filters, between layers.

Binary dropout at a fixed rate is torch's own `nn.Dropout`, which Monte-Carlo prediction keeps on.
Here are multipliers with a distribution to learn: `BinaryDropout`, `GaussianDropout` and, to remove
whole units, `LogNormalDropout`.

Units lie along dimension 1, as for BatchNorm: `(N, C)` or `(N, C, *)`. A multiplier is drawn for
every example and unit and holds for all positions of a channel. With `zm.weight` one draw serves
the whole batch, with `zm.mean` multipliers are their means. As in all layers, noise does not depend
on `.training`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    require_floating,
    require_integer,
    require_numbers,
)
from zeromean.layers.stochastic_module import StochasticModule
from zeromean.samplers.fixed_noise import KeptNoise
from zeromean.samplers.kinds import Draws, drawn_by
from zeromean.samplers.outputs import local
from zeromean.samplers.sampler import Sampler

# Signal-to-noise ratio below which a unit is dropped: Neklyudov et al. (2017).
SNR_THRESHOLD = 1.0


class UnitNoise(StochasticModule):
    """Random multipliers of the units of a layer, and a mask of the units that are left.

    Attributes:
        keep: Which units are left, `(num_features,)`; the others return exactly zero.
        prunable: Whether a low signal-to-noise ratio says that a unit carries nothing.
        kl_weight: Factor of the KL term.
    """

    keep: Tensor
    prunable: bool
    kl_weight: float = 1.0

    def __init__(self, num_features: int, device: torch.device | str | None):
        super().__init__()
        self.num_features = require_integer("num_features", num_features, at_least=1)
        self.sampler = local
        self.register_buffer("keep", torch.ones(self.num_features, dtype=torch.bool, device=device))

    # What noise must answer, for all units: those that are left and the others.

    def draw_noise(self, num_objects: int = 1) -> Tensor:
        """Draw the noise that `multipliers` takes, `(num_objects, num_features)`."""
        raise NotImplementedError

    def multipliers(self, noise: Tensor) -> Tensor:
        """The multipliers that this noise gives, in its shape."""
        raise NotImplementedError

    def mean(self) -> Tensor:
        """Mean of every multiplier, `(num_features,)`."""
        raise NotImplementedError

    def log_snr(self) -> Tensor:
        """log(mean / standard deviation) of every multiplier, `(num_features,)`."""
        raise NotImplementedError

    def kl_per_unit(self) -> Tensor:
        """KL(q ‖ p) of every multiplier, `(num_features,)`."""
        raise NotImplementedError

    def clip_log_alpha_(self, low: float, high: float) -> None:
        """Project log α into [low, high], in place, where it is learned."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Set the initial parameters, and keep all units."""
        raise NotImplementedError

    # What follows from it.

    def draw(self, num_objects: int) -> Tensor:
        """Draw multipliers, `(num_objects, num_features)`."""
        return self.multipliers(self.draw_noise(num_objects))

    def mean_scale(self) -> Tensor:
        """What mean propagation multiplies the units by: exactly zero for those not kept."""
        return self._kept(self.mean())

    def sample_scale(self, num_objects: int) -> Tensor:
        """Draw multipliers, `(num_objects, num_features)`: exactly zero for units not kept."""
        return self._kept(self.draw(num_objects))

    def scale_for(self, input: Tensor) -> Tensor:
        """The multipliers for a batch, as the sampler has them: `(C,)`, `(1, C)` or `(N, C)`."""
        drawn = drawn_by(self.sampler)
        if drawn is Draws.NOTHING:
            return self.mean_scale()
        if isinstance(self.sampler, KeptNoise):
            return self._kept(self.multipliers(self.sampler.noise_of(self, input)))
        return self.sample_scale(1 if drawn is Draws.WEIGHTS else input.shape[0])

    def distributions(self) -> dict[str, nn.Module]:
        return {"units": self}

    def kl_terms(self) -> dict[nn.Module, Callable[[], Tensor]]:
        return {self: lambda: self.kl_weight * self._kept(self.kl_per_unit()).sum()}

    def accepted_sampler(self, sampler: Sampler) -> Sampler:
        return sampler

    def prune_(self, threshold: float = SNR_THRESHOLD) -> int:
        """Drop the units whose signal-to-noise ratio is below the threshold, for good.

        Units dropped before stay dropped, through further training too. Returns how many are
        dropped now. (`zm.prune_`, for whole models, counts in log α = −2 log of that ratio.)
        """
        if not self.prunable:
            raise ValueError(
                f"{type(self).__name__} cannot be pruned by its signal-to-noise ratio: a unit that "
                "is nothing but noise may still carry everything in its variance; use "
                "zm.LogNormalDropout, whose multipliers are positive."
            )
        require_numbers(threshold=threshold)
        if not 0 < threshold < math.inf:
            raise ValueError(f"threshold must be a positive number, got {threshold}.")
        with torch.no_grad():
            dropped = self.keep & (self.log_snr() < math.log(threshold))
            self.keep.logical_and_(~dropped)
        return int(dropped.sum())

    def forward(self, input: Tensor) -> Tensor:
        require_floating(type(self).__name__, input)
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__} needs an input of shape (N, {self.num_features}) or "
                f"(N, {self.num_features}, *), got {tuple(input.shape)}."
            )
        return _multiplied(input, self.scale_for(input))

    def _kept(self, per_unit: Tensor) -> Tensor:
        return torch.where(self.keep, per_unit, 0.0)


class UnitScale(nn.Module):
    """Fixed multipliers of units: what noise on units becomes in a deterministic model.

    Args:
        scale: The multipliers, `(num_features,)`.
    """

    scale: Tensor

    def __init__(self, scale: Tensor):
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, input: Tensor) -> Tensor:
        return _multiplied(input, self.scale)

    def extra_repr(self) -> str:
        return str(self.scale.numel())


def _multiplied(input: Tensor, scale: Tensor) -> Tensor:
    """The input, `(N, C, *)`, times the multipliers of its units, `(C,)`, `(1, C)` or `(N, C)`."""
    positions = [1] * (input.dim() - 2)
    return input * scale.to(input.dtype).view(*scale.shape, *positions)
