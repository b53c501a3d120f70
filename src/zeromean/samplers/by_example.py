"""Outputs of weights that depend on each other: drawn together for each example."""

from __future__ import annotations

import torch
from torch import Tensor

from zeromean.distributions.noise import normal
from zeromean.distributions.posteriors.low_rank import LowRank
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.functional.numerics import safe_sqrt
from zeromean.samplers.linear_maps import Convolution, Dense, LinearMap, squared


def draw_by_example(
    op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None
) -> Tensor:
    """op(x, W) with a weight of its own for every example, along the first dimension.

    Exact for each example, with the correlations of all its outputs. Weights of low rank are not
    drawn: their own noise is that of `local`, and each shared direction is one more product.
    """
    if _is_single(op, x):
        return draw_by_example(op, x.unsqueeze(0), posterior, bias).squeeze(0)
    plain = isinstance(op, (Dense, Convolution)) and not op.computes_in_float16(posterior)
    if isinstance(posterior, LowRank) and plain:
        return _low_rank(op, x, posterior, bias)
    like = torch.empty((len(x), *posterior.shape), dtype=posterior.dtype, device=posterior.device)
    return op.each(x, posterior(posterior.noise(like)), bias)


def _low_rank(op: LinearMap, x: Tensor, posterior: LowRank, bias: Tensor | None) -> Tensor:
    mean_weight = posterior.mean_weight()
    assert mean_weight is not None
    mean = op(x, mean_weight, bias)
    std = safe_sqrt(op(squared(x), posterior.own_variance()))
    # (rank, examples, *outputs), and a number for each direction and example.
    directions = torch.func.vmap(lambda column: op(x, column))(posterior.columns())
    shared = normal(directions.flatten(2)[..., :1])
    along = (directions * shared.view(*shared.shape[:2], *[1] * (directions.dim() - 2))).sum(0)
    return mean + std * normal(std) + along


def _is_single(op: LinearMap, x: Tensor) -> bool:
    """Whether an input is one example without a batch dimension."""
    if isinstance(op, Convolution):
        return x.dim() == len(op.stride) + 1
    return isinstance(op, Dense) and x.dim() == 1
