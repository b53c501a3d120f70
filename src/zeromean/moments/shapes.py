"""What moves elements about and computes nothing: means and variances go the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.moments.random_tensor import RandomTensor
from zeromean.moments.rules import NoRuleError, register


def alike(function: Callable[..., Any], *, keeps_all: bool = False) -> Callable[..., Any]:
    """The rule of a function that only moves elements.

    Args:
        keeps_all: Whether they stay where they are, so that covariances hold.
    """

    def rule(x: RandomTensor, *args: Any, **kwargs: Any) -> Any:
        mean, variance = x.moments()
        means, variances = function(mean, *args, **kwargs), function(variance, *args, **kwargs)
        if not isinstance(means, Tensor):
            parts = zip(means, variances, strict=True)
            return type(means)(RandomTensor(*part) for part in parts)
        same = keeps_all or (means.shape == mean.shape and function in _RESHAPES)
        return RandomTensor(means, variances, x.covariance_of if same else None)

    return rule


def _of_several(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rule(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        pairs = [t.moments() if isinstance(t, RandomTensor) else (t, t * 0) for t in tensors]
        means, variances = zip(*pairs, strict=True)
        return RandomTensor(function(means, *args, **kwargs), function(variances, *args, **kwargs))

    return rule


def _view(x: Tensor, *shape: Any) -> Tensor:
    """As a reshape: images are in channels_last here, whatever the model was given."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise NoRuleError("Bits of a random activation cannot be read as another type.")
    return x.reshape(*shape)


_RESHAPES = {_view, torch.reshape, Tensor.reshape, torch.flatten, Tensor.flatten}
for _calls in (
    (torch.reshape,),
    (Tensor.reshape,),
    (torch.flatten, Tensor.flatten),
    (torch.unflatten,),
    (Tensor.unflatten,),
    (torch.permute,),
    (Tensor.permute,),
    (torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, Tensor.swapdims),
    (torch.movedim, Tensor.movedim),
    (torch.t, Tensor.t),
    (torch.squeeze, Tensor.squeeze),
    (torch.unsqueeze, Tensor.unsqueeze),
    (Tensor.expand,),
    (Tensor.repeat,),
    (torch.tile, Tensor.tile),
    (torch.repeat_interleave, Tensor.repeat_interleave),
    (Tensor.__getitem__,),
    (torch.narrow, Tensor.narrow),
    (torch.select, Tensor.select),
    (torch.index_select, Tensor.index_select),
    (torch.gather, Tensor.gather),
    (torch.flip, Tensor.flip),
    (torch.roll, Tensor.roll),
    (torch.chunk, Tensor.chunk),
    (torch.split,),
    (Tensor.split,),
    (torch.unbind, Tensor.unbind),
    (torch.broadcast_to, Tensor.broadcast_to),
    (F.pixel_shuffle,),
    (F.pixel_unshuffle,),
    (F.channel_shuffle,),
):
    register(*_calls)(alike(_calls[0]))
for _calls in (
    (Tensor.contiguous,),
    (torch.clone, Tensor.clone),
    (torch.detach, Tensor.detach),
    (Tensor.to,),
    (Tensor.float,),
    (Tensor.double,),
    (Tensor.cpu,),
    (Tensor.cuda,),
    (Tensor.type_as,),
):
    register(*_calls)(alike(_calls[0], keeps_all=True))
register(Tensor.view)(alike(_view))
register(Tensor.expand_as)(lambda x, other: x.expand(other.shape))
register(Tensor.view_as, Tensor.reshape_as)(lambda x, other: x.reshape(other.shape))
register(Tensor.T.__get__, Tensor.mT.__get__)(alike(lambda x: x.mT))  # pyright: ignore
for _call in (torch.cat, torch.concat, torch.concatenate, torch.stack):
    register(_call)(_of_several(_call))


@register(F.pad)
def _pad(x: RandomTensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    mean, variance = x.moments()
    if mode == "constant":
        return RandomTensor(F.pad(mean, pad, value=value), F.pad(variance, pad))
    return RandomTensor(F.pad(mean, pad, mode), F.pad(variance, pad, mode))


@register(F.interpolate)
def _interpolate(
    x: RandomTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if not mode.startswith("nearest"):
        raise NoRuleError(
            f"Moments know F.interpolate with mode='nearest', got {mode!r}; use method='samples'."
        )
    options = (size, scale_factor, mode, *args)
    mean, variance = (F.interpolate(part, *options, **kwargs) for part in x.moments())
    return RandomTensor(mean, variance)
