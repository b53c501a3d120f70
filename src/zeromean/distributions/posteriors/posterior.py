"""What q(W) is: a distribution of one weight tensor, whether or not its weights are independent.

Its parameters stand in a layer's state dict under `weight.`; and `mask`, once weights have been
pruned: a pruned weight is exactly zero and has no noise. Most are a `FactorizedPosterior`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.arguments import (
    nearest,
    require_function,
    require_integer,
    require_numbers,
    shown,
)
from zeromean.distributions.noise import NoiseFamily
from zeromean.registry import NOISES

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
        affine: Whether it is a bias, or the scale of a norm: not a weight to prune or to count.
    """

    fan_in: int | None = None
    neuron_dim: int = 0
    groups: int = 1
    noiseless_row: int | None = None
    affine: bool = False


class Posterior(nn.Module):
    """A distribution over one weight tensor.

    Args:
        shape: Shape of the weight tensor.
        noise: Noise family: `zm.normal`, `zm.rademacher`, `zm.uniform` or `zm.factorized`.
        layout: How the layer reads the tensor.

    Attributes:
        symmetric: Whether noise is as likely above zero as below, which flipping signs needs.
        positive: Whether weights are positive, which takes a prior of such weights.
        mask: True where a weight is kept, False where it has been pruned; None until `zm.prune_`
            prunes something. The parameters of pruned weights stay as they are and are not read,
            so that setting it back to None takes the pruning back.
    """

    has_mean = True
    symmetric = True
    positive = False
    mask: Tensor | None

    def __init__(self, shape: Sequence[int] | None, noise: NoiseFamily, layout: WeightLayout):
        super().__init__()
        require_function("noise", noise, nearest(noise, NOISES.shipped))
        self.shape = _require_shape(shape)
        self.noise = noise
        self.layout = layout
        self.register_buffer("mask", None)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__bases__ == (Posterior,) and "mean_and_scale" in vars(cls):
            from zeromean.distributions.posteriors import factorized

            # In 0.1 all weights were independent, and subclasses of this one said how.
            if hasattr(factorized, "FactorizedPosterior"):  # It is being defined otherwise.
                cls.__bases__ = (factorized.FactorizedPosterior,)
                warnings.warn(
                    f"{cls.__name__} has a mean and a scale for every weight: make it a subclass "
                    "of zm.FactorizedPosterior, as which it is treated until 0.3.",
                    DeprecationWarning,
                    stacklevel=2,
                )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mask" and value is not None:
            value = self._require_mask(value)
        super().__setattr__(name, value)  # pyright: ignore[reportArgumentType]

    # What a posterior must answer.

    def moments(self, rows: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Mean and variance of every weight by itself; a mean of None is exactly zero.

        Args:
            rows: Indices along dimension 0. Only these rows are computed, in the shape
                `(*rows.shape, *shape[1:])`, so that an embedding does not touch its whole table.
        """
        raise NotImplementedError

    def mean_weight(self, rows: Tensor | None = None) -> Tensor | None:
        """The mean of every weight alone; None: exactly zero."""
        raise NotImplementedError

    def draw_noise(self) -> Tensor:
        """Draw ε for one weight tensor, for `forward`."""
        raise NotImplementedError

    def forward(self, noise: Tensor) -> Tensor:
        """The weight that this noise gives.

        Args:
            noise: One ε for every weight, `(*shape)`, or several draws, `(*, *shape)`.
        """
        raise NotImplementedError

    def log_determinant(self) -> Tensor:
        """log det of the covariance of the weights that are random."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw initial parameters."""
        raise NotImplementedError

    def set_weight_(self, weight: Tensor) -> None:
        """Take a trained weight over as the mean (ZeroMean: its magnitude as the scale)."""
        raise NotImplementedError

    # What follows from it.

    def sample(self) -> Tensor:
        """Draw one weight tensor."""
        return self(self.draw_noise())

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
        """The shape, as a tensor has it: code for torch's layers calls `layer.weight.size(0)`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def settings(self) -> dict[str, Any]:
        """What builds it again, next to the shape and the noise: arguments that JSON knows."""
        return {}

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
