"""What q(W) is: the variational parameters of a weight tensor and its noise family.

Every posterior is w = mean + scale · ε, with ε of zero mean and unit variance, independent for each
weight (but for `zm.factorized` noise, where weights of a row or a column share a factor).
Its parameters stand in a layer's state dict under `weight.`: `scale` (ZeroMean), `mean` and
`log_alpha` (Multiplicative), `mean` and `log_variance` (Additive); and `mask`, once weights have
been pruned: a pruned weight is exactly zero and has no noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.arguments import (
    nearest,
    require_choice,
    require_dtype,
    require_function,
    require_integer,
    require_numbers,
    shown,
)
from zeromean.functional import smallest_normal
from zeromean.noise import NOISES, NoiseFamily, normal

SHARES = ("layer", "neuron", "weight")


@dataclass(frozen=True)
class WeightLayout:
    """What a layer knows about its weight tensor and a posterior needs.

    Args:
        fan_in: Inputs of one output unit; sets the size of the initial weights.
            Default: the product of all sizes but the first.
        neuron_dim: Dimension along which the output units lie, 0 or 1.
        groups: Blocks along dimension 0, each with output units of its own (grouped transposed
            convolutions).
        noiseless_row: A row without noise (an embedding's padding index).
    """

    fan_in: int | None = None
    neuron_dim: int = 0
    groups: int = 1
    noiseless_row: int | None = None


class Posterior(nn.Module):
    """A distribution over one weight tensor.

    Args:
        shape: Shape of the weight tensor.
        noise: Noise family: `zm.normal`, `zm.rademacher`, `zm.uniform` or `zm.factorized`.
        layout: How the layer reads the tensor.

    Attributes:
        mask: True where a weight is kept, False where it has been pruned; None until `zm.prune_`
            prunes something. The parameters of pruned weights stay as they are and are not read,
            so that setting it back to None takes the pruning back.
    """

    has_mean = True
    mask: Tensor | None

    def __init__(self, shape: Sequence[int] | None, noise: NoiseFamily, layout: WeightLayout):
        super().__init__()
        require_function("noise", noise, nearest(noise, list(NOISES)))
        self.shape = _require_shape(shape)
        self.noise = noise
        self.layout = layout
        self.register_buffer("mask", None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mask" and value is not None:
            value = self._require_mask(value)
        super().__setattr__(name, value)  # pyright: ignore[reportArgumentType]

    # What a posterior must answer.

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """The mean (None: exactly zero) and a signed standard deviation of every weight."""
        raise NotImplementedError

    def log_variance_per_weight(self) -> Tensor:
        """Logarithm of the variance of every weight, in its shape; −∞ for pruned weights."""
        raise NotImplementedError

    def log_alpha_per_weight(self) -> Tensor:
        """log α = log(variance / mean²) of every weight, in its shape; +∞ for pruned weights."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw initial parameters."""
        raise NotImplementedError

    def set_weight_(self, weight: Tensor) -> None:
        """Take a trained weight over as the mean (ZeroMean: its magnitude as the scale)."""
        raise NotImplementedError

    def clip_log_alpha_(self, low: float, high: float) -> None:
        """Project log α into [low, high], in place, where it is learned."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how its log α is clipped; give it a method "
            "clip_log_alpha_(low, high)."
        )

    # What follows from it.

    def moments(self, rows: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Mean and variance of every weight; a mean of None is exactly zero.

        A variance too small for a normal floating-point number is exactly zero: training drives
        most scales of a variance layer there, and denormals make matrix products crawl.

        Args:
            rows: Indices along dimension 0. Only these rows are computed, in the shape
                `(*rows.shape, *shape[1:])`, so that an embedding does not touch its whole table.
        """
        mean, scale = self.mean_and_scale(rows)
        return mean, flushed(self.silenced(scale, rows)).square()

    def mean_weight(self, rows: Tensor | None = None) -> Tensor | None:
        """The mean of every weight alone; None: exactly zero."""
        return self.mean_and_scale(rows)[0] if self.has_mean else None

    def sample(self) -> Tensor:
        """Draw one weight tensor."""
        mean, scale = self.mean_and_scale()
        scale = self.silenced(scale)
        return _combined(mean, scale, self.noise(scale))

    def draw_noise(self) -> Tensor:
        """Draw ε for one weight tensor, for `forward`."""
        return self.noise(self.mean_and_scale()[1].detach())

    def forward(self, noise: Tensor) -> Tensor:
        """The weight, mean + scale · noise, that this noise gives.

        Args:
            noise: One ε for every weight, `(*shape)`, or several draws, `(*, *shape)`.
        """
        mean, scale = self.mean_and_scale()
        return _combined(mean, self.silenced(scale), noise)

    def deviation(self) -> Tensor:
        """Draw one weight tensor less its mean."""
        scale = self.silenced(self.mean_and_scale()[1])
        return scale * self.noise(scale)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        """torch asks this where a posterior stands for a tensor: a layer of its own that reads
        `linear.weight`. That it is here keeps nn.TransformerEncoderLayer from its fast path."""
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{name} needs a tensor, but the weight of a stochastic layer is a distribution "
            f"({cls.__name__}); call the layer, or take weight.sample() or weight.mean_weight()."
        )

    def counted(self, per_weight: Tensor) -> Tensor:
        """The values of the random weights: without those of the noiseless row."""
        row = self.layout.noiseless_row
        if row is None:
            return per_weight
        return torch.cat([per_weight[:row], per_weight[row + 1 :]])

    def masked(self, per_weight: Tensor, rows: Tensor | None = None, value: float = 0.0) -> Tensor:
        """Values for every weight, with `value` (and no gradient) at the pruned ones."""
        if self.mask is None:
            return per_weight
        mask = self.mask if rows is None else self.mask[rows]
        return per_weight.masked_fill(~mask, value)

    @property
    def device(self) -> torch.device:
        return self._any_parameter.device

    @property
    def dtype(self) -> torch.dtype:
        return self._any_parameter.dtype

    @property
    def _any_parameter(self) -> Tensor:
        # The replicas of nn.DataParallel keep plain tensors, under the second name.
        for tensors in (self._parameters, self.__dict__.get("_former_parameters", {})):
            for tensor in tensors.values():
                if tensor is not None:
                    return tensor
        return next(self.parameters())

    @property
    def initial_bound(self) -> float:
        """1/√fan_in, the range of torch's initial weights and biases."""
        fan_in = self.layout.fan_in
        fan_in = math.prod(self.shape[1:]) if fan_in is None else fan_in
        return 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def num_random(self) -> int:
        """Number of weights that are random: all but those of the noiseless row."""
        silent = 0 if self.layout.noiseless_row is None else self.numel() // self.shape[0]
        return self.numel() - silent

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As of a tensor: code that was written for torch's layers asks `layer.weight.size(0)`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def extra_repr(self) -> str:
        pruned = "" if self.mask is None else ", pruned"
        return f"{tuple(self.shape)}, noise={self.noise.__name__}{pruned}"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """A state dict says whether weights are pruned: the mask comes and goes with it."""
        name = f"{prefix}mask"
        if name in state_dict and self.mask is None:
            self.mask = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        elif name not in state_dict and any(prefix + p in state_dict for p in self._parameters):
            self.mask = None
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def silenced(self, scale: Tensor, rows: Tensor | None = None) -> Tensor:
        """The scale (or variance) with the noiseless row at zero."""
        row = self.layout.noiseless_row
        if row is None:
            return scale
        if rows is None:
            rows = torch.arange(self.shape[0], device=scale.device)
        return scale.masked_fill((rows == row).unsqueeze(-1), 0.0)

    def _require_mask(self, mask: Any) -> Tensor:
        """A mask in the shape of the weight, from one that broadcasts against it."""
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(
                f"mask must be a bool tensor, True for the weights to keep, got {shown(mask)}."
            )
        if mask.shape == self.shape:
            return mask
        try:
            return mask.expand(self.shape).contiguous()
        except RuntimeError as error:
            raise ValueError(
                f"mask must have the shape of the weight, {tuple(self.shape)}, or broadcast to "
                f"it, got {tuple(mask.shape)}."
            ) from error

    def _look_up(self, parameter: Tensor, rows: Tensor | None) -> Tensor:
        if rows is None:
            return parameter
        return F.embedding(rows, parameter, padding_idx=self.layout.noiseless_row)

    def _initialize_like_torch_(self, parameter: Tensor) -> None:
        """Uniform in ±1/√fan_in, as torch and the authors do; the noiseless row is zero."""
        bound = self.initial_bound
        with torch.no_grad():
            parameter.uniform_(-bound, bound)
            if self.layout.noiseless_row is not None:
                parameter[self.layout.noiseless_row] = 0.0


PosteriorFactory = Callable[..., Posterior]


class ZeroMean(Posterior):
    """w = scale · ε: everything the weight knows is in its variance.

    `scale` is signed and starts uniformly in ±1/√fan_in; the standard deviation is its absolute
    value. Neklyudov et al. (2019), section 3.
    """

    has_mean = False

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        noise: NoiseFamily = normal,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout)
        require_dtype(dtype)
        self.scale = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.reset_parameters()

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[None, Tensor]:
        return None, self.masked(self._look_up(self.scale, rows), rows)

    def log_variance_per_weight(self) -> Tensor:
        return self.masked(2 * _log_magnitude(self.scale), value=-math.inf)

    def log_alpha_per_weight(self) -> Tensor:
        return torch.full_like(self.scale, math.inf)

    def clip_log_alpha_(self, low: float, high: float) -> None:
        """Nothing to do: α is infinite by definition."""

    def reset_parameters(self) -> None:
        self._initialize_like_torch_(self.scale)

    def set_weight_(self, weight: Tensor) -> None:
        """Take the magnitudes of a weight over as scales.

        A weight that is zero everywhere says nothing, and scales of zero have no gradient that
        could change that: the layer starts like a new one.
        """
        with torch.no_grad():
            if weight.is_meta or weight.any():
                self.scale.copy_(weight.abs())


class Multiplicative(Posterior):
    """w = mean · (1 + √α · ε): Gaussian dropout with a learned α. Kingma et al. (2015).

    Args:
        share: One α for each "layer", "neuron" (output unit, filter or embedding column) or
            "weight".
        log_alpha: Initial log α.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        share: Literal["layer", "neuron", "weight"] = "layer",
        log_alpha: float = -5.0,
        noise: NoiseFamily = normal,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout)
        require_dtype(dtype)
        require_choice("share", share, SHARES)
        self.share = share
        self.initial_log_alpha = _require_finite("log_alpha", log_alpha)
        num_neurons = self.shape[layout.neuron_dim] * layout.groups
        alpha_shape = {"layer": (), "neuron": (num_neurons,), "weight": self.shape}[share]
        self.mean = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.log_alpha = nn.Parameter(torch.empty(alpha_shape, device=device, dtype=dtype))
        self.reset_parameters()

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean = self.mean_weight(rows)
        if rows is None:
            log_alpha = self._broadcastable_log_alpha()
        else:  # Neurons are columns then.
            log_alpha = self.log_alpha
            log_alpha = self._look_up(log_alpha, rows) if self.share == "weight" else log_alpha
        return mean, mean * (0.5 * log_alpha).exp()

    def mean_weight(self, rows: Tensor | None = None) -> Tensor:
        return self.masked(self._look_up(self.mean, rows), rows)

    def log_variance_per_weight(self) -> Tensor:
        log_variance = 2 * _log_magnitude(self.mean) + self._broadcastable_log_alpha()
        return self.masked(log_variance, value=-math.inf)

    def log_alpha_per_weight(self) -> Tensor:
        return self.masked(self._broadcastable_log_alpha().expand(self.shape), value=math.inf)

    @torch.no_grad()
    def clip_log_alpha_(self, low: float, high: float) -> None:
        if self.log_alpha.requires_grad:
            self.log_alpha.clamp_(low, high)

    @property
    def weights_per_alpha(self) -> int:
        """How many random weights share one α."""
        return self.num_random // self.log_alpha.numel()

    def reset_parameters(self) -> None:
        self._initialize_like_torch_(self.mean)
        nn.init.constant_(self.log_alpha, self.initial_log_alpha)

    def set_weight_(self, weight: Tensor) -> None:
        with torch.no_grad():
            self.mean.copy_(weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, share={self.share!r}"

    def _broadcastable_log_alpha(self) -> Tensor:
        """log α in a shape that broadcasts against the weight."""
        if self.share != "neuron":
            return self.log_alpha
        trailing = [1] * (self.dim() - 1 - self.layout.neuron_dim)
        if self.layout.neuron_dim == 0:
            return self.log_alpha.view(-1, *trailing)
        # Output units lie along dimension 1; the block of dimension 0 says which of them.
        blocks = self.log_alpha.view(self.layout.groups, self.shape[1], *trailing)
        if self.layout.groups == 1:
            return blocks
        return blocks.repeat_interleave(self.shape[0] // self.layout.groups, dim=0)


class Additive(Posterior):
    """w = mean + σ · ε with a mean and a log-variance for every weight.

    The gradient of the mean is free of the weight's own noise, which is what lets sparse
    variational dropout learn large α. Molchanov et al. (2017).

    Args:
        log_variance: Initial log σ², the same for every weight. Default: −10.
        log_alpha: Initial log(σ² / mean²) in its place: noise relative to each weight, so that
            layers with large and small weights get as much of it.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        *,
        log_variance: float | None = None,
        log_alpha: float | None = None,
        noise: NoiseFamily = normal,
        layout: WeightLayout = WeightLayout(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(shape, noise, layout)
        require_dtype(dtype)
        if log_variance is not None and log_alpha is not None:
            raise ValueError(
                "The initial noise is either log_variance, the same for every weight, or "
                f"log_alpha, relative to each; got {log_variance} and {log_alpha}."
            )
        self.initial_log_alpha = (
            None if log_alpha is None else _require_finite("log_alpha", log_alpha)
        )
        self.initial_log_variance = _require_finite(
            "log_variance", -10.0 if log_variance is None else log_variance
        )
        self.mean = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.log_variance = nn.Parameter(torch.empty(self.shape, device=device, dtype=dtype))
        self.reset_parameters()

    def mean_and_scale(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scale = (0.5 * self._look_up(self.log_variance, rows)).exp()
        return self.mean_weight(rows), self.masked(scale, rows)

    def mean_weight(self, rows: Tensor | None = None) -> Tensor:
        return self.masked(self._look_up(self.mean, rows), rows)

    def moments(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # Straight from the logarithm: exp and square would be two more passes over the weights.
        variance = self._look_up(self.log_variance, rows).exp()
        in_place = not torch.is_grad_enabled()
        variance = F.threshold(variance, smallest_normal(variance.dtype), 0.0, inplace=in_place)
        return self.mean_weight(rows), self.masked(self.silenced(variance, rows), rows)

    def log_variance_per_weight(self) -> Tensor:
        return self.masked(self.log_variance, value=-math.inf)

    def log_alpha_per_weight(self) -> Tensor:
        log_alpha = self.log_variance - 2 * _log_magnitude(self.mean)
        return self.masked(log_alpha, value=math.inf)

    @torch.no_grad()
    def clip_log_alpha_(self, low: float, high: float) -> None:
        if self.log_variance.requires_grad:
            log_alpha = self.log_alpha_per_weight()
            # Pruned weights have no α to move.
            self.log_variance.add_(self.masked(log_alpha.clamp(low, high) - log_alpha))

    def reset_parameters(self) -> None:
        self._initialize_like_torch_(self.mean)
        self._reset_noise_()

    def set_weight_(self, weight: Tensor) -> None:
        with torch.no_grad():
            self.mean.copy_(weight)
        if self.initial_log_alpha is not None:
            self._reset_noise_()

    @torch.no_grad()
    def _reset_noise_(self) -> None:
        if self.initial_log_alpha is None:
            nn.init.constant_(self.log_variance, self.initial_log_variance)
            return
        magnitude = self.mean.to(torch.promote_types(self.dtype, torch.float32)).abs()
        typical = magnitude.square().mean().sqrt()
        typical = torch.where(typical > 0, typical, self.initial_bound)
        # A weight near zero gets a little noise too: without any it would hardly learn how much.
        magnitude = magnitude.maximum(0.01 * typical)
        self.log_variance.copy_(2 * magnitude.log() + self.initial_log_alpha)


def flushed(scale: Tensor) -> Tensor:
    """The scale, at exactly zero where its square would be too small for a normal number."""
    return F.hardshrink(scale, math.sqrt(smallest_normal(scale.dtype)))


def _combined(mean: Tensor | None, scale: Tensor, noise: Tensor) -> Tensor:
    return scale * noise if mean is None else torch.addcmul(mean, scale, noise)


def _log_magnitude(weight: Tensor) -> Tensor:
    # Finite at zero, in value and gradient: clamp_min passes no gradient below its bound.
    return weight.abs().clamp_min(torch.finfo(weight.dtype).tiny).log()


def _require_shape(shape: Any) -> torch.Size:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise TypeError(
            f"A posterior needs the shape of its weight, such as (out_features, in_features), got "
            f"{shown(shape)}; layers take the class itself and give it the shape."
        )
    return torch.Size([require_integer("a size in shape", size, at_least=0) for size in shape])


def _require_finite(name: str, value: float) -> float:
    require_numbers(**{name: value})
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}.")
    return float(value)
