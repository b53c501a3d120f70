"""Noise on units: dropout and multipliers, as means and variances."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from zeromean.layers.dropout.unit_noise import UnitNoise
from zeromean.moments.arithmetic import times
from zeromean.moments.random_tensor import Diagonal, RandomTensor
from zeromean.moments.rules import register


def dropped_out(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """x times a multiplier that is 0 with probability p, and 1 / (1 − p) otherwise.

    That positions of a channel share a multiplier is forgotten, as other correlations are.
    """
    if not training or p == 0:
        return x
    if p == 1:
        return x * 0.0
    if isinstance(x, RandomTensor):
        mean, variance = x.moments()
        spread = (variance + p * mean.square()) / (1 - p)
    else:
        mean, spread = x, x.square() * (p / (1 - p))
    return RandomTensor(mean, spread, Diagonal(spread))


register(F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d)(dropped_out)


@register(_DropoutNd)
def _dropout(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
        forward: Any = type(module).forward
        return forward(module, x)  # Refused by name, as functions are.
    return dropped_out(x, module.p, module.training)


@register(UnitNoise)
def _unit_noise(module: Any, x: Tensor) -> Tensor:
    mean = module.mean_scale()
    # log_snr is the logarithm of the mean over the standard deviation.
    variance = torch.where(module.keep, (module.mean() * (-module.log_snr()).exp()).square(), 0.0)
    shape = (-1, *[1] * (x.dim() - 2))
    return times(x, RandomTensor(mean.to(x.dtype).view(shape), variance.to(x.dtype).view(shape)))
