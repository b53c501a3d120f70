"""Gaussian likelihoods for regression: the noise of the targets, learned or predicted."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_LOG_TWO_PI = math.log(2 * math.pi)


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
        if num_outputs < 1:
            raise ValueError(f"num_outputs must be at least 1, got {num_outputs}.")
        if not 0 < noise_variance < math.inf:
            raise ValueError(f"noise_variance must be positive, got {noise_variance}.")
        log_variance = torch.full(
            (num_outputs,), math.log(noise_variance), device=device, dtype=dtype
        )
        self.log_noise_variance = nn.Parameter(log_variance, requires_grad=learn)

    def mean_and_log_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the targets, given what the network puts out."""
        num_outputs = len(self.log_noise_variance)
        if num_outputs > 1 and outputs.shape[-1:] != (num_outputs,):
            raise ValueError(
                f"This likelihood has {num_outputs} noise variances, so outputs must have the "
                f"shape (objects, {num_outputs}), got {tuple(outputs.shape)}."
            )
        return outputs, self.log_noise_variance.expand_as(outputs)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, summed over the outputs of an object, averaged over objects."""
        return _gaussian_nll(*self.mean_and_log_variance(outputs), targets)


class HeteroscedasticGaussianLikelihood(nn.Module):
    """Targets with noise that depends on the input: the network puts out mean and log-variance.

    The last dimension of the output holds the means in its first half and the log-variances in
    its second.
    """

    def mean_and_log_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the targets, given what the network puts out."""
        if outputs.shape[-1] % 2:
            raise ValueError(
                "A heteroscedastic network needs an even last dimension (means, then "
                f"log-variances), got outputs of shape {tuple(outputs.shape)}."
            )
        mean, log_variance = outputs.chunk(2, dim=-1)
        return mean, log_variance

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, summed over the outputs of an object, averaged over objects."""
        return _gaussian_nll(*self.mean_and_log_variance(outputs), targets)


def _gaussian_nll(mean: Tensor, log_variance: Tensor, targets: Tensor) -> Tensor:
    if mean.dim() < 2:
        raise ValueError(
            f"Outputs must have the shape (objects, outputs), got {tuple(mean.shape)}; "
            "use outputs.unsqueeze(-1)."
        )
    if mean.shape != targets.shape:
        # Broadcasting (N, 1) against (N,) would silently compare every pair.
        raise ValueError(
            f"targets must have the shape of the predicted means, {tuple(mean.shape)}, "
            f"got {tuple(targets.shape)}; reshape them."
        )
    squared = (targets - mean).square() * (-log_variance).exp()
    return 0.5 * (squared + log_variance + _LOG_TWO_PI).sum(-1).mean()
