"""Moments of a linear map, whose weight or input or both are random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.full_covariance import FullCovariance
from zeromean.distributions.posteriors.low_rank import LowRank
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.functional.numerics import can_branch
from zeromean.moments.random_tensor import Covariance, Diagonal, RandomTensor
from zeromean.moments.rules import NoRuleError
from zeromean.samplers.fixed_noise import KeptNoise
from zeromean.samplers.linear_maps import Convolution, Dense, LinearMap, arranged, squared

# Columns of a factor of a covariance that are multiplied at once.
_COLUMNS_AT_ONCE = 256
# Copies of smaller images and their weights cost more than the better format gains.
_WORTH_COPYING = 2**14


class Propagated(KeptNoise):
    """The sampler that draws nothing: mean and variance of each output go on instead."""

    def __call__(
        self, op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None
    ) -> Tensor:
        if isinstance(posterior, (FullCovariance, LowRank)):
            return _of_dependent_weights(op, x, posterior, bias)
        if not isinstance(posterior, FactorizedPosterior):
            raise NoRuleError(
                "Moments have rules for FactorizedPosterior, FullCovariance and LowRank, got "
                f"{type(posterior).__name__}, whose covariance is not known; use method='samples'."
            )
        if isinstance(x, RandomTensor):
            with _plain():
                weight = posterior.moments()
            return _of_random_input(op, x, *weight, bias)
        with _plain():
            mean, variance = _of_fixed_input(op, x, posterior, bias)
            mean = _mean(op, mean, variance, bias)
        # Positions of a convolution share its weights.
        independent = not isinstance(op, Convolution)
        return RandomTensor(mean, variance, Diagonal(variance) if independent else None)

    def one_weight(self, posterior: Posterior) -> Tensor:
        mean, variance = posterior.moments()
        return RandomTensor(torch.zeros_like(variance) if mean is None else mean, variance)

    def with_bias(self, op: LinearMap, output: Tensor, x: Tensor, bias: Posterior) -> Tensor:
        assert isinstance(output, RandomTensor)
        mean, variance = bias.moments()
        with _plain():
            spread = op.align_bias(variance).expand(output.shape).contiguous()
            mean = None if mean is None else op.align_bias(mean)
            shift = torch.zeros_like(spread) if mean is None else mean.expand_as(spread)
        # Positions share a bias, features do not.
        covariance = Diagonal(spread) if isinstance(op, Dense) else None
        return output + RandomTensor(shift, spread, covariance)

    def noise_of(self, distribution: Any, x: Tensor) -> Tensor:
        raise NoRuleError(f"Moments have no rule for {type(distribution).__name__}.")


def of_fixed_weight(op: LinearMap, x: RandomTensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """op(x, weight) with a weight that is not random."""
    return _of_random_input(op, x, weight, None, bias)


def _of_random_input(
    op: LinearMap,
    x: RandomTensor,
    weight_mean: Tensor | None,
    weight_variance: Tensor | None,
    bias: Tensor | None,
) -> RandomTensor:
    """Var = op(m² + v, var(w)) + op(v, E(w)²), for independent inputs and weights."""
    mean, variance = x.moments()
    with _plain():
        better = _format(op, mean)
        mean, variance = arranged(mean, better), arranged(variance, better)
        average = None if weight_mean is None else op(mean, weight_mean, bias)
        spread: Tensor | None = None
        if weight_variance is not None:
            spread = op(torch.addcmul(variance, mean, mean), weight_variance)
        if weight_mean is not None:
            through = op(variance, weight_mean.square())
            spread = through if spread is None else spread + through
        assert spread is not None
        average = _mean(op, average, spread, bias)
    covariance = None
    if isinstance(op, Dense):
        covariance = _covariance_through(x, weight_mean, weight_variance)
    return RandomTensor(average, spread, covariance)


def _covariance_through(
    x: RandomTensor, weight_mean: Tensor | None, weight_variance: Tensor | None
) -> Covariance:
    """W Σ Wᵀ, and on the diagonal what random weights add."""

    def covariance(rows: Tensor | None = None, /) -> Tensor:
        mean, variance = x.moments()
        before = x.covariance_of or Diagonal(variance)
        through = own = None
        if weight_mean is not None:
            through = before(weight_mean if rows is None else rows @ weight_mean)
        if weight_variance is not None:
            own = Diagonal((mean.square() + variance) @ weight_variance.mT)(rows)
        if through is None or own is None:
            found = own if through is None else through
            assert found is not None
            return found
        return through + own

    return covariance


def _of_fixed_input(
    op: LinearMap, x: Tensor, posterior: FactorizedPosterior, bias: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The first two moments for an input that is not random; a mean of None is the bias alone."""
    better = _format(op, x)
    if better is None or not isinstance(op, Convolution):
        return op.moments(x, posterior, bias)
    weight_mean, weight_variance = posterior.moments()
    x = arranged(x, better)
    variance = op.convolve(squared(x), arranged(weight_variance, better))
    if weight_mean is None:
        return None, variance
    return op.convolve(x, arranged(weight_mean, better), bias), variance


def _format(op: LinearMap, x: Tensor) -> torch.memory_format | None:
    """channels_last for images on a CPU: element-wise maths behind it goes on in that format."""
    if not (isinstance(op, Convolution) and x.dim() == 4 and x.device.type == "cpu"):
        return None
    return torch.channels_last if can_branch() and x.numel() >= _WORTH_COPYING else None


def _plain() -> Any:
    """For maths on plain tensors: nothing in it is for a rule, and asking takes time."""
    return torch._C.DisableTorchFunction()


def _mean(op: LinearMap, mean: Tensor | None, like: Tensor, bias: Tensor | None) -> Tensor:
    if mean is not None and mean.shape == like.shape:
        return mean
    mean = op.align_bias(bias) if mean is None and bias is not None else mean
    return torch.zeros_like(like) if mean is None else mean.expand_as(like)


def _of_dependent_weights(
    op: LinearMap, x: Tensor, posterior: FullCovariance | LowRank, bias: Tensor | None
) -> RandomTensor:
    """Var = Σₖ op(m, Lₖ)² + op(m², own) + op(v, E w²), with the columns Lₖ of the covariance."""
    weight_mean, weight_variance = posterior.moments()
    columns, own = posterior.columns(), posterior.own_variance()
    assert weight_mean is not None
    if isinstance(x, RandomTensor):
        mean, variance = x.moments()
        spread = op(variance, weight_variance + weight_mean.square())
    else:
        mean, spread = x, None
    parts = columns.split(_COLUMNS_AT_ONCE)
    outputs = torch.cat([torch.func.vmap(lambda w: op(mean, w))(part) for part in parts])
    by_itself = None if own is None else op(squared(mean), own)
    spread = sum((s for s in (spread, by_itself) if s is not None), start=outputs.square().sum(0))

    def covariance(rows: Tensor | None = None, /) -> Tensor:
        by_columns = outputs.movedim(0, -2)  # (*, columns, features)
        total = by_columns.mT @ by_columns
        if by_itself is not None:
            total = total + torch.diag_embed(by_itself)
        if isinstance(x, RandomTensor):
            # Weights on the same input go together for its variance too.
            inputs = x.moments()[1]
            total = total + torch.einsum("cij,ckj,...j->...ik", columns, columns, inputs)
            if own is not None:
                total = total + torch.diag_embed(op(inputs, own))
            total = total + _covariance_through(x, weight_mean, None)()
        return total if rows is None else rows @ total @ rows.mT

    dense = isinstance(op, Dense)
    return RandomTensor(op(mean, weight_mean, bias), spread, covariance if dense else None)
