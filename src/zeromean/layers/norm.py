"""Norms whose affine parameters are random: twins of torch's BatchNorm, LayerNorm and GroupNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from zeromean.arguments import require_floating
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.posterior import PosteriorFactory, WeightLayout
from zeromean.layers.stochastic_layer import (
    PriorChoice,
    SamplerChoice,
    StochasticLayer,
    build_posterior,
)
from zeromean.registry import register
from zeromean.samplers.linear_maps import LinearMap, Scale


class StochasticNorm(StochasticLayer):
    """A norm of torch without affine parameters, and a random scale and shift behind it.

    State-dict keys are `weight.…`, `bias.…` and, of BatchNorm, `normalize.running_mean` and others.

    Args:
        normalize: torch's norm, without affine parameters.
        shape: Shape of scale and shift.
        bias: Whether there is a shift.
    """

    normalize: nn.Module

    def __init__(
        self,
        normalize: nn.Module,
        shape: Sequence[int],
        posterior: PosteriorFactory,
        prior: PriorChoice,
        sampler: SamplerChoice,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        bias: bool = True,
    ):
        layout = WeightLayout(fan_in=1, affine=True)
        place = {"device": device, "dtype": dtype}
        scale = build_posterior(posterior, shape, layout=layout, **place)
        super().__init__(scale, torch.Size(shape) if bias else None, prior, sampler)
        self.normalize = normalize
        self.reset_parameters()
        if self.bias is not None:
            self.make_bias_random_(posterior)

    def linear_map(self) -> LinearMap:
        return Scale()

    def forward(self, input: Tensor) -> Tensor:
        require_floating(type(self).__name__, input)
        trailing = 0 if isinstance(self.normalize, nn.LayerNorm) else max(input.dim() - 2, 0)
        return self.draw(Scale(trailing), self.normalize(input))

    def reset_parameters(self) -> None:
        """Scales of one and shifts of zero, as torch's, with the initial noise."""
        self.weight.reset_parameters()
        self.weight.set_weight_(torch.ones(self.weight.shape))
        if isinstance(self.bias, nn.Parameter):
            nn.init.zeros_(self.bias)
        elif self.bias is not None:
            self.bias.reset_parameters()
            self.bias.set_weight_(torch.zeros(self.bias.shape))

    def plain_twin(self) -> nn.Module:
        twin = self._affine_twin()
        for name, buffer in self.normalize.named_buffers():
            setattr(twin, name, buffer)
        return twin

    @classmethod
    def from_torch(cls, module: Any, **options: Any) -> Self:
        layer = cls._from_settings(module, **options)
        for name, buffer in module.named_buffers():
            setattr(layer.normalize, name, buffer)
        return layer

    def _affine_twin(self) -> nn.Module:
        """torch's norm of the same settings, with affine parameters on the meta device."""
        raise NotImplementedError

    @classmethod
    def _from_settings(cls, module: Any, **options: Any) -> Self:
        """A layer of the settings of torch's."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return super().extra_repr().removeprefix("bias=False, ")


class _BatchNorm(StochasticNorm):
    """torch's signature of BatchNorm1d, BatchNorm2d and BatchNorm3d, once."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        *,
        posterior: PosteriorFactory = Additive,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        normalize = self.torch_twin(
            num_features, eps, momentum, False, track_running_stats, **place
        )
        super().__init__(normalize, (num_features,), posterior, prior, sampler, device, dtype)

    def _affine_twin(self) -> nn.Module:
        own: Any = self.normalize
        settings = own.num_features, own.eps, own.momentum, True, own.track_running_stats
        return self.torch_twin(*settings, device="meta")

    @classmethod
    def _from_settings(cls, module: Any, **options: Any) -> Self:
        settings = module.num_features, module.eps, module.momentum, module.track_running_stats
        return cls(*settings, **options)


@register("layer")
class BatchNorm1d(_BatchNorm):
    """`nn.BatchNorm1d` with a random scale and shift."""

    torch_twin = nn.BatchNorm1d


@register("layer")
class BatchNorm2d(_BatchNorm):
    """`nn.BatchNorm2d` with a random scale and shift."""

    torch_twin = nn.BatchNorm2d


@register("layer")
class BatchNorm3d(_BatchNorm):
    """`nn.BatchNorm3d` with a random scale and shift."""

    torch_twin = nn.BatchNorm3d


@register("layer")
class GroupNorm(StochasticNorm):
    """`nn.GroupNorm` with a random scale and shift."""

    torch_twin = nn.GroupNorm

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        *,
        posterior: PosteriorFactory = Additive,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        normalize = nn.GroupNorm(num_groups, num_channels, eps, affine=False)
        super().__init__(normalize, (num_channels,), posterior, prior, sampler, device, dtype)

    def _affine_twin(self) -> nn.Module:
        own: Any = self.normalize
        return nn.GroupNorm(own.num_groups, own.num_channels, own.eps, device="meta")

    @classmethod
    def _from_settings(cls, module: Any, **options: Any) -> Self:
        return cls(module.num_groups, module.num_channels, module.eps, **options)


@register("layer")
class LayerNorm(StochasticNorm):
    """`nn.LayerNorm` with a random scale and shift."""

    torch_twin = nn.LayerNorm

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        bias: bool = True,
        *,
        posterior: PosteriorFactory = Additive,
        prior: PriorChoice = "default",
        sampler: SamplerChoice = "default",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        normalize = nn.LayerNorm(sizes, eps, elementwise_affine=False)
        super().__init__(normalize, sizes, posterior, prior, sampler, device, dtype, bias)

    def _affine_twin(self) -> nn.Module:
        own: Any = self.normalize
        bias = self.bias is not None
        return nn.LayerNorm(own.normalized_shape, own.eps, bias=bias, device="meta")

    @classmethod
    def _from_settings(cls, module: Any, **options: Any) -> Self:
        return cls(module.normalized_shape, module.eps, module.bias is not None, **options)
