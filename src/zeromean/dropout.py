"""Noise on units: random multipliers of neurons and filters, between layers.

Binary dropout is torch's own `nn.Dropout`, which Monte-Carlo prediction keeps on. Here are
multipliers with a distribution to learn: `GaussianDropout` and, to remove whole units,
`LogNormalDropout`.

Units lie along dimension 1, as for BatchNorm: `(N, C)` or `(N, C, *)`. A multiplier is drawn for
every object and unit and holds for all positions of a channel. With `zm.weight` one draw serves
the whole batch, with `zm.mean` multipliers are their means. As everywhere, noise does not depend
on `.training`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from zeromean import functional, lognormal
from zeromean.arguments import (
    require_choice,
    require_dtype,
    require_floating,
    require_integer,
    require_numbers,
)
from zeromean.held import KeptNoise
from zeromean.noise import normal
from zeromean.samplers import Sampler, local, mean, weight
from zeromean.stochastic import StochasticModule

# Signal-to-noise ratio below which a unit is dropped: Neklyudov et al. (2017).
SNR_THRESHOLD = 1.0


class UnitNoise(StochasticModule):
    """Random multipliers of the units of a layer, and a mask of the units that are left.

    Attributes:
        keep: Which units are left, `(num_features,)`; the others put out exactly zero.
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
        if self.sampler is mean:
            return _multiplied(input, self.mean_scale())
        if isinstance(self.sampler, KeptNoise):
            noise = self.sampler.noise_of(self, input)
            return _multiplied(input, self._kept(self.multipliers(noise)))
        return _multiplied(
            input, self.sample_scale(1 if self.sampler is weight else input.shape[0])
        )

    def _kept(self, per_unit: Tensor) -> Tensor:
        return torch.where(self.keep, per_unit, 0.0)


class GaussianDropout(UnitNoise):
    """Multipliers from N(1, α), with the α of binary dropout at rate p: p / (1 − p).

    Learned, this is variational dropout with correlated weight noise: the prior is log-uniform,
    and its KL counts the units, not their weights. Kingma et al. (2015), section 3.2.

    Args:
        num_features: Number of units: C of an input `(N, C, *)`.
        p: Drop rate of the binary dropout that has the same variance; sets the initial α.
        share: One α for the "layer" or for each "unit".
        learn: Learn α. Otherwise it stays as it is and there is no KL term.
    """

    prunable = False

    def __init__(
        self,
        num_features: int,
        p: float = 0.5,
        *,
        share: Literal["layer", "unit"] = "layer",
        learn: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(num_features, device)
        require_dtype(dtype)
        require_numbers(p=p)
        if not 0 < p < 1:
            raise ValueError(f"p must lie between 0 and 1, got {p}.")
        require_choice("share", share, ("layer", "unit"))
        self.p = p
        self.share = share
        self.learn = learn
        log_alpha = torch.empty(
            () if share == "layer" else (self.num_features,), device=device, dtype=dtype
        )
        if learn:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)
        self.reset_parameters()

    def draw_noise(self, num_objects: int = 1) -> Tensor:
        return normal(self.log_alpha.new_empty(num_objects, self.num_features))

    def multipliers(self, noise: Tensor) -> Tensor:
        return 1 + (0.5 * self.log_alpha).exp() * noise

    def mean(self) -> Tensor:
        return self.log_alpha.new_ones(self.num_features)

    def log_snr(self) -> Tensor:
        return -0.5 * self.log_alpha.expand(self.num_features)

    def kl_per_unit(self) -> Tensor:
        kl = functional.log_uniform_kl((-functional.wide(self.log_alpha)).exp())
        return kl.expand(self.num_features)

    def kl_terms(self) -> dict[nn.Module, Callable[[], Tensor]]:
        return super().kl_terms() if self.learn else {}

    @torch.no_grad()
    def clip_log_alpha_(self, low: float, high: float) -> None:
        if self.log_alpha.requires_grad:
            self.log_alpha.clamp_(low, high)

    def reset_parameters(self) -> None:
        self.keep.fill_(True)
        nn.init.constant_(self.log_alpha, math.log(self.p) - math.log1p(-self.p))

    def extra_repr(self) -> str:
        return f"{self.num_features}, p={self.p:g}, share={self.share!r}, learn={self.learn}"


class LogNormalDropout(UnitNoise):
    """Log-normal multipliers between e^low and e^high, for structured sparsity.

    log θ is normal with mean `location` and standard deviation exp(`log_scale`), cut to
    [low, high]; the prior of log θ is uniform there. Units that the network can do without become
    nothing but noise; `prune_` drops those whose signal-to-noise ratio is below 1. Put it behind a
    layer, before or after its BatchNorm and activation. Neklyudov et al. (2017).

    Args:
        num_features: Number of units: C of an input `(N, C, *)`.
        low: Logarithm of the smallest multiplier.
        high: Logarithm of the largest multiplier.
        location: Initial mean of log θ.
        log_scale: Initial logarithm of the standard deviation of log θ.
        kl_weight: Weight of its KL term. More than 1 says that units of this layer cost more than
            their nats, as filters do, which run at many positions.
    """

    prunable = True

    def __init__(
        self,
        num_features: int,
        *,
        low: float = -20.0,
        high: float = 0.0,
        location: float = 0.0,
        log_scale: float = -5.0,
        kl_weight: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(num_features, device)
        require_dtype(dtype)
        require_numbers(
            low=low, high=high, location=location, log_scale=log_scale, kl_weight=kl_weight
        )
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"low must be less than high, got low={low}, high={high}.")
        if not (math.isfinite(location) and math.isfinite(log_scale)):
            raise ValueError(
                "location and log_scale must be finite, got "
                f"location={location}, log_scale={log_scale}."
            )
        if not 0 <= kl_weight < math.inf:
            raise ValueError(f"kl_weight must be at least 0 and finite, got {kl_weight}.")
        self.low, self.high = low, high
        self.kl_weight = kl_weight
        self.initial_location, self.initial_log_scale = location, log_scale
        self.location = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))
        self.log_scale = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))
        self.reset_parameters()

    def draw_noise(self, num_objects: int = 1) -> Tensor:
        shape = (num_objects, self.num_features)
        return torch.rand(shape, dtype=torch.float64, device=self.location.device)

    def multipliers(self, noise: Tensor) -> Tensor:
        theta = lognormal.sample(self.location, self.log_scale, self.low, self.high, noise)
        return theta.to(self.location.dtype)

    def mean(self) -> Tensor:
        log_mean = lognormal.log_mean(self.location, self.log_scale, self.low, self.high)
        return log_mean.exp().to(self.location.dtype)

    def log_snr(self) -> Tensor:
        log_snr = lognormal.log_snr(self.location, self.log_scale, self.low, self.high)
        return log_snr.to(self.location.dtype)

    def kl_per_unit(self) -> Tensor:
        kl = lognormal.kl(self.location, self.log_scale, self.low, self.high)
        return kl.to(functional.wide(self.location).dtype)

    def clip_log_alpha_(self, low: float, high: float) -> None:
        """Nothing to do: these multipliers have no α."""

    def reset_parameters(self) -> None:
        self.keep.fill_(True)
        nn.init.constant_(self.location, self.initial_location)
        nn.init.constant_(self.log_scale, self.initial_log_scale)

    def extra_repr(self) -> str:
        kept = int(self.keep.sum()) if not self.keep.is_meta else self.num_features
        left = "" if kept == self.num_features else f", {kept} left"
        weight = "" if self.kl_weight == 1 else f", kl_weight={self.kl_weight:g}"
        return (
            f"{self.num_features}, low={self.low:g}, high={self.high:g}, "
            f"location={self.initial_location:g}, log_scale={self.initial_log_scale:g}"
            f"{weight}{left}"
        )


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
