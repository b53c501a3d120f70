"""Layers like others, with fewer units."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zeromean.distributions.posteriors.factorized import independent
from zeromean.distributions.posteriors.zero_mean import ZeroMean
from zeromean.layers.embedding import Embedding
from zeromean.layers.linear import Linear
from zeromean.layers.stochastic_layer import StochasticLayer


def resized(layer: Any, weight: Tensor, bias: Tensor | None, groups: int | None = None) -> Any:
    """A layer like another one, with a weight (for a variance layer, a scale) of another shape."""
    options: dict[str, Any] = {"device": "meta"}
    if isinstance(layer, (nn.Embedding, Embedding)):
        sizes = tuple(weight.shape)
        options["padding_idx"] = layer.padding_idx
    else:
        outputs, inputs = weight.shape[:2]
        options["bias"] = bias is not None
        if not isinstance(layer, (nn.Linear, Linear)):
            groups = int(layer.groups if groups is None else groups)
            names = ["kernel_size", "stride", "padding", "dilation", "padding_mode"]
            names += ["output_padding"] if layer.transposed else []
            options.update({name: getattr(layer, name) for name in names}, groups=groups)
            inputs *= groups
            if layer.transposed:
                outputs, inputs = weight.shape[1] * groups, weight.shape[0]
        sizes = (inputs, outputs)
    if isinstance(layer, StochasticLayer):
        options.update(prior=None, sampler=layer.sampler)
        posterior = layer.weight
        options["posterior"] = lambda shape, **o: ZeroMean(shape, noise=posterior.noise, **o)
    kind: Any = type(layer)
    new = kind(*sizes, **options)
    if isinstance(layer, StochasticLayer):
        new.weight.scale = nn.Parameter(weight, requires_grad=False)
    else:
        new.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        new.bias = nn.Parameter(bias, requires_grad=False)
    return new


def with_units(
    layer: Any, outputs: Tensor, inputs: Tensor | None = None, extra: Tensor | None = None
) -> nn.Module:
    """The layer with some of its units, and something added to their bias."""
    weight = _weight(layer)
    bias = None if layer.bias is None else layer.bias[outputs]
    if extra is not None and extra.any() and not isinstance(layer, StochasticLayer):
        bias = extra[outputs] if bias is None else bias + extra[outputs]
    if getattr(layer, "transposed", False):
        weight = weight[:, outputs] if inputs is None else weight[inputs][:, outputs]
    else:
        weight = weight[outputs] if inputs is None else weight[outputs][:, inputs]
    return resized(layer, weight.detach().clone(), bias)


def depthwise_with_units(layer: Any, outputs: Tensor) -> nn.Module:
    """A convolution of every channel by itself, for some channels."""
    bias = None if layer.bias is None else layer.bias[outputs]
    repeats = layer.out_channels // layer.in_channels
    weight = _weight(layer)[outputs].detach().clone()
    return resized(layer, weight, bias, groups=len(weight) // repeats)


def embedding_with_units(layer: Any, keep: Tensor) -> nn.Module:
    """An embedding with some of its columns."""
    return resized(layer, _weight(layer)[:, keep].detach().clone(), None)


def norm_with_units(norm: Any, keep: Tensor) -> nn.Module:
    """BatchNorm for some of its units."""
    like = norm.running_mean
    options = {"device": like.device, "dtype": like.dtype}
    small = type(norm)(int(keep.sum()), norm.eps, norm.momentum, norm.affine, **options)
    state = {
        name: value[keep] if value.dim() else value for name, value in norm.state_dict().items()
    }
    small.load_state_dict(state)
    return small.eval()


def _weight(layer: Any) -> Tensor:
    """The weight of a layer; for a variance layer, its scale."""
    if isinstance(layer, StochasticLayer):
        return independent(layer.weight, "zm.compress").mean_and_scale()[1]
    return layer.weight
