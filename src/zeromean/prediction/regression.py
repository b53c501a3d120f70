"""Regression: the mean of a prediction, and its aleatoric and epistemic variance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, Unpack, overload

import torch
from torch import Tensor

from zeromean.arguments import shown
from zeromean.prediction.by_moments import Method, Outputs, regression, wants_moments
from zeromean.prediction.inputs import InputsOrLoader
from zeromean.prediction.monte_carlo import Consumer, draw_outputs
from zeromean.prediction.options import Options, require_several
from zeromean.prediction.running import Running
from zeromean.prediction.sources import Source, is_one
from zeromean.samplers.sampler import Sampler


class NoiseModel(Protocol):
    """What a regression needs to know of its noise: see `zeromean.training.likelihoods`."""

    def mean_and_log_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]: ...


class PredictiveMoments(NamedTuple):
    """Moments of a regression's predictive distribution."""

    mean: Tensor
    aleatoric: Tensor
    """Variance of the noise of the targets, averaged over the samples."""
    epistemic: Tensor
    """Variance of the predicted mean over the samples: what more data would reduce."""

    @property
    def variance(self) -> Tensor:
        return self.aleatoric + self.epistemic


@overload
def predict_moments(
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    likelihood: NoiseModel | None = None,
    return_stderr: Literal[False] = False,
    **options: Unpack[Options],
) -> PredictiveMoments: ...


@overload
def predict_moments(
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    likelihood: NoiseModel | None = None,
    return_stderr: Literal[True],
    **options: Unpack[Options],
) -> tuple[PredictiveMoments, PredictiveMoments]: ...


def predict_moments(
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    likelihood: NoiseModel | None = None,
    sampler: Sampler | Literal["auto"] | None = None,
    seed: int | None = None,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    devices: int | None = None,
    return_stderr: bool = False,
    method: Method = "samples",
) -> Any:
    """Mean, aleatoric and epistemic variance of a regression.

    Args:
        model: Any module. What it draws noise with, stochastic layers and Dropout, is on. Or
            several networks that count alike, each with `num_samples` draws: a list of modules
            (an ensemble), or `zm.States` (one architecture, many stored weights).
        inputs: A tensor, a tuple of positional or a mapping of keyword arguments. Or a DataLoader
            that gives one of these, or `(inputs, targets)`, a batch, in a fixed order: it is read
            once, and its inputs are kept in memory.
        num_samples: Draws of the noise.
        method: "samples", or "moments": one pass that carries means and variances in place of
            samples. It takes no num_samples, sampler, seed, chunk_size, devices or return_stderr;
            docs, Moments, says how good it is.
        likelihood: The likelihood of the training (`zm.GaussianLikelihood` or
            `zm.HeteroscedasticGaussianLikelihood`). Without one the aleatoric variance is zero.
        sampler: How every stochastic layer draws, in place of its own way (`zm.weight`, `zm.mean`,
            …); "auto" lets dense layers on vectors draw weights where that is cheaper.
        seed: Makes the draw reproducible, for the same model, inputs, chunk and batch size, without
            touching the global generator.
        chunk_size: Samples that run at once. Default: so many that more samples need no more
            memory.
        batch_size: Examples, along dimension 0 of inputs and outputs, that run at once. Default:
            all. A sample is one network for all of them where weights are drawn (`zm.weight`).
            Inputs whose length is that of the first one are split alike, others go to every batch
            as they are. One that only happens to be as long, and is not by example, needs
            `unsqueeze(0)`.
        select: Picks a tensor from what the model returns. Default: the tensor itself, or what is
            called `logits` in a mapping, a named tuple or a dataclass (Hugging Face's outputs).
        devices: Processes that share the samples; with a seed the numbers do not depend on how many
            there are. A script needs `if __name__ == "__main__":`.
        return_stderr: Return `(moments, standard errors)`, the latter in the same form.
    """
    if wants_moments(method, sampler, seed, chunk_size, devices, return_stderr):
        _require_likelihood(likelihood)
        noise_of = None if likelihood is None else likelihood.mean_and_log_variance
        return PredictiveMoments(*regression(Outputs(model, inputs, batch_size, select), noise_of))
    if return_stderr or is_one(model):
        require_several("predict_moments", num_samples)
    _require_likelihood(likelihood)
    means, noises = Running(spread=True, keep=return_stderr), Running(spread=return_stderr)

    def take(outputs: Tensor) -> None:
        if likelihood is None:
            mean, noise = outputs, torch.zeros_like(outputs)
        else:
            mean, log_variance = likelihood.mean_and_log_variance(outputs)
            noise = log_variance.exp()
        means.update(mean)
        noises.update(noise)

    finish = (means.end_network, noises.end_network)
    draw_outputs(
        model,
        inputs,
        num_samples,
        lambda _: Consumer(take, finish),
        sampler=sampler,
        seed=seed,
        chunk_size=chunk_size,
        batch_size=batch_size,
        select=select,
        devices=devices,
    )
    moments = PredictiveMoments(means.mean, noises.mean, means.variance())
    if not return_stderr:
        return moments
    # The variance is an average of squared deviations: its error is theirs.
    spread = means.stderr_of((means.kept() - means.mean).square())
    return moments, PredictiveMoments(means.stderr(), noises.stderr(), spread)


def _require_likelihood(likelihood: Any) -> None:
    method = getattr(likelihood, "mean_and_log_variance", None)
    if likelihood is not None and (isinstance(likelihood, type) or not callable(method)):
        raise TypeError(
            "likelihood must have a method mean_and_log_variance(outputs), as "
            f"zm.GaussianLikelihood() has, got {shown(likelihood)}."
        )
