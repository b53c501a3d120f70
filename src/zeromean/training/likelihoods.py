"""The data term: Gaussian likelihoods for regression, classes, and functions of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    require_dtype,
    require_floating,
    require_integer,
    require_numbers,
    shown,
)
from zeromean.moments import RandomTensor

_LOG_TWO_PI = math.log(2 * math.pi)


class Likelihood(Protocol):
    """What the data term needs; parameters of a module that is one are trained too."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, averaged over the examples."""
        ...


class FunctionLikelihood(nn.Module):
    """A likelihood that is a function of outputs and targets, such as `nn.PoissonNLLLoss()`.

    Args:
        function: Gives the negative log-likelihood, averaged over the examples.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.function = function

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, averaged over the examples."""
        nll = self.function(outputs, targets)
        if not isinstance(nll, Tensor) or nll.dim() > 0:
            raise ValueError(
                "A likelihood must give one number, averaged over the examples, got "
                f"{shown(nll)}; use nll.mean()."
            )
        return nll


def as_likelihood(value: Any) -> Likelihood | None:
    """What has a method `nll`, a function of outputs and targets, or None for classes."""
    if value is None or (not isinstance(value, type) and callable(getattr(value, "nll", None))):
        return value
    if isinstance(value, type) or not callable(value):
        raise TypeError(
            "likelihood must have a method nll(outputs, targets), as zm.GaussianLikelihood() has, "
            f"or be a function of outputs and targets, got {shown(value)}."
        )
    function: Any = value
    return FunctionLikelihood(function)


def require_class_targets(targets: Tensor) -> None:
    """Refuse targets that are no classes, where no likelihood has been chosen."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(
            f"Without a likelihood targets must be classes, whole numbers, got {targets.dtype} of "
            f"shape {tuple(targets.shape)}; for a regression pass "
            "likelihood=zm.GaussianLikelihood()."
        )


def require_classes_of(outputs: Tensor, targets: Tensor) -> None:
    """Refuse targets that are no classes of these outputs."""
    require_class_targets(targets)
    wanted = (outputs.shape[0], *outputs.shape[2:])
    if outputs.dim() < 2 or targets.shape != wanted:
        raise ValueError(
            f"For outputs of shape {tuple(outputs.shape)} targets must be classes of shape "
            f"{wanted}, got {tuple(targets.shape)}."
        )
    low, high = int(targets.min()), int(targets.max())
    # -100 is what torch's cross-entropy leaves out.
    if (low < 0 and low != -100) or high >= outputs.shape[1]:
        raise ValueError(
            f"Targets must be classes from 0 to {outputs.shape[1] - 1}, as many as the model has "
            f"outputs, got {low} to {high}."
        )


class GaussianLikelihood(nn.Module):
    """Targets with the same noise for every input: N(output, noise_variance), learned.

    Args:
        num_outputs: Outputs with a noise variance of their own, in the last dimension.
        noise_variance: Initial noise variance.
        learn: Whether the noise variance is learned.
    """

    def __init__(
        self,
        num_outputs: int = 1,
        *,
        noise_variance: float = 1.0,
        learn: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        num_outputs = require_integer("num_outputs", num_outputs, at_least=1)
        require_dtype(dtype)
        require_numbers(noise_variance=noise_variance)
        if not 0 < noise_variance < math.inf:
            raise ValueError(f"noise_variance must be positive, got {noise_variance}.")
        log_variance = torch.full(
            (num_outputs,), math.log(noise_variance), device=device, dtype=dtype
        )
        self.log_noise_variance = nn.Parameter(log_variance, requires_grad=learn)

    def mean_and_log_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the targets, given what the network returns."""
        require_floating("A likelihood", outputs)
        num_outputs = len(self.log_noise_variance)
        if num_outputs > 1 and outputs.shape[-1:] != (num_outputs,):
            raise ValueError(
                f"This likelihood has {num_outputs} noise variances, so outputs must have the "
                f"shape (examples, {num_outputs}), got {tuple(outputs.shape)}."
            )
        return outputs, self.log_noise_variance.expand_as(outputs)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, summed over outputs, averaged over examples."""
        return _gaussian_nll(*self.mean_and_log_variance(outputs), targets)

    def expected_nll(self, outputs: RandomTensor, targets: Tensor) -> Tensor:
        """The same for normal outputs, expected."""
        mean, variance = outputs.moments()
        mean, log_variance = self.mean_and_log_variance(mean)
        spread = 0.5 * (variance * (-log_variance).exp()).sum(-1).mean()
        return _gaussian_nll(mean, log_variance, targets) + spread


class HeteroscedasticGaussianLikelihood(nn.Module):
    """Targets with noise that depends on the input: the network returns mean and log-variance.

    The last dimension of the output holds the means in its first half and the log-variances in
    its second.
    """

    def mean_and_log_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the targets, given what the network returns."""
        require_floating("A likelihood", outputs)
        if outputs.dim() == 0 or outputs.shape[-1] % 2:
            raise ValueError(
                "A heteroscedastic network needs an even last dimension (means, then "
                f"log-variances), got outputs of shape {tuple(outputs.shape)}."
            )
        mean, log_variance = outputs.chunk(2, dim=-1)
        return mean, log_variance

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, summed over outputs, averaged over examples."""
        return _gaussian_nll(*self.mean_and_log_variance(outputs), targets)

    def expected_nll(self, outputs: RandomTensor, targets: Tensor) -> Tensor:
        """The same for normal outputs, expected."""
        averages, variances = outputs.moments()
        mean, log_variance = self.mean_and_log_variance(averages)
        own, of_log = variances.chunk(2, dim=-1)
        shared = mean.new_zeros(())
        if outputs.covariance_of is not None:
            half = mean.shape[-1]
            shared = outputs.covariance_of()[..., :half, half:].diagonal(dim1=-2, dim2=-1)
        _require_targets(mean, targets)
        # e^−s shifts the mean by the covariance with s, and is a log-normal itself.
        precision = (of_log / 2 - log_variance).exp()
        squared = ((targets - mean + shared).square() + own) * precision
        return 0.5 * (squared + log_variance + _LOG_TWO_PI).sum(-1).mean()


def _gaussian_nll(mean: Tensor, log_variance: Tensor, targets: Tensor) -> Tensor:
    _require_targets(mean, targets)
    squared = (targets - mean).square() * (-log_variance).exp()
    return 0.5 * (squared + log_variance + _LOG_TWO_PI).sum(-1).mean()


def _require_targets(mean: Tensor, targets: Any) -> None:
    if not isinstance(targets, Tensor) or targets.is_complex():
        raise TypeError(f"targets must be a tensor of numbers, got {shown(targets)}.")
    if mean.dim() < 2:
        raise ValueError(
            f"Outputs must have the shape (examples, outputs), got {tuple(mean.shape)}; "
            "use outputs.unsqueeze(-1)."
        )
    if mean.shape != targets.shape:
        # Broadcasting (N, 1) against (N,) would silently compare every pair.
        raise ValueError(
            f"targets must have the shape of the predicted means, {tuple(mean.shape)}, "
            f"got {tuple(targets.shape)}; reshape them."
        )
