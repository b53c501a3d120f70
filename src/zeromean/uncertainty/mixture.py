"""Regression: the mixture of Gaussians that the samples of a network make."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeromean.arguments import shown
from zeromean.prediction.inputs import InputsOrLoader
from zeromean.prediction.regression import NoiseModel
from zeromean.prediction.samples import sample_outputs
from zeromean.prediction.sources import Source
from zeromean.uncertainty.arrays import ArrayLike, as_numbers, require_fraction

# Pairs of components that are compared at once.
_PAIRS_AT_ONCE = 4_000_000


class Interval(NamedTuple):
    """Where the targets lie with a given probability."""

    lower: Tensor
    upper: Tensor

    @property
    def width(self) -> Tensor:
        return self.upper - self.lower

    def coverage(self, targets: ArrayLike) -> float:
        """The share of targets inside of their interval."""
        numbers = _as_targets(targets, self.lower)
        return ((self.lower <= numbers) & (numbers <= self.upper)).double().mean().item()


class GaussianMixture:
    """Gaussians of equal weight for every example: one for each sampled network.

    All numbers are in float64, on the CPU.

    Args:
        means: `(num_samples, *examples)`.
        variances: Of the noise of the targets, in the same shape or one that broadcasts; zero where
            a sample is taken as the target itself.
    """

    def __init__(self, means: ArrayLike, variances: ArrayLike):
        self.means = as_numbers("means", means)
        if self.means.dim() < 2 or not self.means.numel():
            raise ValueError(
                f"means must have the shape (num_samples, examples), got {shown(means)}."
            )
        noise = as_numbers("variances", variances)
        try:
            self.variances = noise.broadcast_to(self.means.shape)
        except RuntimeError:
            raise ValueError(
                f"variances must have the shape of the means, {tuple(self.means.shape)}, got "
                f"{tuple(noise.shape)}."
            ) from None
        if (noise < 0).any():
            raise ValueError(f"variances must not be negative, got {noise.min():.4g}.")
        self._stds = self.variances.sqrt()

    @property
    def mean(self) -> Tensor:
        return self.means.mean(0)

    @property
    def variance(self) -> Tensor:
        """Of the noise and of the means together."""
        return self.variances.mean(0) + self.means.var(0, correction=0)

    def log_density(self, targets: ArrayLike) -> Tensor:
        """log p(target) of every example: the average over the samples is of p, not of log p."""
        numbers = _as_targets(targets, self.mean)
        if not (self.variances > 0).all():
            raise ValueError(
                "A density needs noise on the targets, but some variances are zero; pass the "
                "likelihood of the training, or variances of its noise."
            )
        scaled = (numbers - self.means).square() / self.variances
        logs = -0.5 * (scaled + self.variances.log() + math.log(2 * math.pi))
        return logs.logsumexp(0) - math.log(len(logs))

    def cdf(self, targets: ArrayLike) -> Tensor:
        """The probability of values up to the target, which is uniform where predictions are right.

        With targets that is the probability integral transform (PIT): see `plot_pit`.
        """
        return self._cdf(_as_targets(targets, self.mean))

    def quantile(self, probability: float) -> Tensor:
        """The value that targets are below of with this probability."""
        probability = require_fraction("probability", probability, ends="()")
        # Between the lowest and the highest of the components' own.
        own = self.means + self._stds * torch.special.ndtri(torch.tensor(probability).double())
        low, high = own.amin(0), own.amax(0)
        for _ in range(60):
            middle = (low + high) / 2
            below = self._cdf(middle) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def interval(self, level: float = 0.9) -> Interval:
        """The central interval: as many targets are expected below of it as above."""
        level = require_fraction("level", level, ends="()")
        return Interval(self.quantile((1 - level) / 2), self.quantile((1 + level) / 2))

    def crps(self, targets: ArrayLike) -> Tensor:
        """Continuous ranked probability score in the units of the target; lower is better.

        In closed form (Grimit et al., 2006): a mean absolute error for whole distributions.
        """
        numbers = _as_targets(targets, self.mean)
        distance = _mean_absolute(numbers - self.means, self.variances).mean(0).flatten()
        means, variances = self.means.flatten(1), self.variances.flatten(1)
        spread = torch.empty_like(distance)
        step = max(_PAIRS_AT_ONCE // len(means) ** 2, 1)
        for start in range(0, len(spread), step):
            part = slice(start, start + step)
            mean, variance = means[:, part], variances[:, part]
            pairs = _mean_absolute(mean - mean[:, None], variance + variance[:, None])
            spread[part] = pairs.mean((0, 1))
        return (distance - spread / 2).view_as(numbers)

    def _cdf(self, values: Tensor) -> Tensor:
        distance = values - self.means
        smooth = torch.special.ndtr(distance / self._stds)
        return torch.where(self._stds > 0, smooth, (distance >= 0).double()).mean(0)

    def __repr__(self) -> str:
        num_samples, *examples = self.means.shape
        return f"GaussianMixture(num_samples={num_samples}, examples={tuple(examples)})"


def predict_mixture(
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 50,
    *,
    likelihood: NoiseModel | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
) -> GaussianMixture:
    """The predictive distribution of a regression, a Gaussian for each sample.

    Args:
        model: As `zm.predict_moments` takes it: one network, several, `zm.States`.
        num_samples: Draws of the noise.
        likelihood: The likelihood of the training (`zm.GaussianLikelihood` or
            `zm.HeteroscedasticGaussianLikelihood`). Without one there is no noise on the targets,
            and intervals are those of the mean alone: too narrow for targets.
        seed: Makes the draw reproducible.
        batch_size: Examples that run at once. Default: all.
    """
    outputs = sample_outputs(model, inputs, num_samples, seed=seed, batch_size=batch_size)
    if likelihood is None:
        return GaussianMixture(outputs, torch.zeros(()))
    with torch.no_grad():
        mean, log_variance = likelihood.mean_and_log_variance(outputs)
    return GaussianMixture(mean, log_variance.double().exp())


def predict_interval(
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 50,
    *,
    level: float = 0.9,
    likelihood: NoiseModel | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
) -> Interval:
    """Where the targets of a regression lie with the probability `level`.

    Quantiles of the mixture that the samples make: noise of the targets and of the weights. What
    holds without trust in the network is a conformal interval.

    The arguments are those of `predict_mixture`.
    """
    require_fraction("level", level, ends="()")
    mixture = predict_mixture(
        model, inputs, num_samples, likelihood=likelihood, seed=seed, batch_size=batch_size
    )
    return mixture.interval(level)


def _mean_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """E|x| of a Gaussian."""
    std = variance.sqrt()
    scaled = torch.where(std > 0, mean / std, 0)
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2 * math.pi)
    smooth = 2 * std * density + mean * (2 * torch.special.ndtr(scaled) - 1)
    return torch.where(std > 0, smooth, mean.abs())


def _as_targets(targets: Any, like: Tensor) -> Tensor:
    numbers = as_numbers("targets", targets)
    if numbers.shape != like.shape:
        # Broadcasting (N,) against (N, 1) would silently compare every pair.
        raise ValueError(
            f"targets must have the shape of the predictions, {tuple(like.shape)}, got "
            f"{tuple(numbers.shape)}; reshape them."
        )
    return numbers
