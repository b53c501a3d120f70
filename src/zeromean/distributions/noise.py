"""Noise families: zero mean, unit variance, symmetric.

Each is a function of a tensor whose shape, dtype and device the noise takes. Drawing is
out of place, from torch's global generator, so that it works under `torch.func.vmap` with
`randomness="different"` and under `torch.compile`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from zeromean.arguments import require_floating
from zeromean.registry import register

NoiseFamily = Callable[[Tensor], Tensor]


@register("noise")
def normal(like: Tensor) -> Tensor:
    """Standard normal noise."""
    return _in_memory_order(torch.randn_like, like)


@register("noise")
def rademacher(like: Tensor) -> Tensor:
    """Bernoulli noise on ±1, each with probability ½: the paper's Bernoulli variance layer."""
    # Detached, as forward-mode differentiation does not know integers.
    return _in_memory_order(torch.randint_like, like.detach(), 2).mul(2).sub(1)


@register("noise")
def uniform(like: Tensor) -> Tensor:
    """Uniform noise on ±√3, which has unit variance; Uniform(−1, 1) would have variance ⅓."""
    return _in_memory_order(torch.rand_like, like).sub(0.5).mul(2 * math.sqrt(3.0))


@register("noise")
def factorized(like: Tensor) -> Tensor:
    """Noise of rank one: f(a_i) · f(b_j) with normal a, b and f(x) = sign(x) √|x|.

    As many random numbers as the weight has rows and columns. Weights are uncorrelated but not
    independent; √(π/2) gives them unit variance. The noise of noisy networks for exploration,
    Fortunato et al. (2017).
    """
    require_floating("Noise", like)
    matrix = like.unsqueeze(-1).flatten(1)
    rows, columns = normal(matrix[:, 0]), normal(matrix[0])
    roots = [x.sign() * x.abs().sqrt() for x in (rows, columns)]
    return torch.outer(*roots).mul(math.sqrt(math.pi / 2)).view(like.shape)


def _in_memory_order(draw: Callable[..., Tensor], like: Tensor, *arguments: int) -> Tensor:
    """Draw contiguously, in the memory format of `like`.

    torch's generators are many times slower on tensors that are not contiguous, such as
    channels_last ones.
    """
    require_floating("Noise", like)
    if like.dim() < 4 or like.stride(1) != 1:
        return draw(like, *arguments, memory_format=torch.contiguous_format)
    channels_last = like.movedim(1, -1)
    noise = draw(channels_last, *arguments, memory_format=torch.contiguous_format)
    return noise.movedim(-1, 1)
