"""Monte-Carlo prediction: average over the weights, without a loop.

Inside a prediction BatchNorm uses its running statistics and torch's Dropout modules stay on
(Monte-Carlo dropout); the modes are restored afterwards. The function `F.dropout(x, p,
self.training)` goes by the mode of the module that calls it, which is eval: make it a module.

Noise must come from torch: a draw of Python's or numpy's generators inside the model is the same
for all samples. Threads that predict at the same time need a copy of the model each; with seeds
they wait for each other, and what other threads draw meanwhile without one is not reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from zeromean.arguments import require_integer, shown
from zeromean.prediction.inputs import InputsOrLoader, as_arguments
from zeromean.prediction.monte_carlo import draw_outputs
from zeromean.prediction.probabilities import Link, OutputKind, ToProbabilities
from zeromean.prediction.running import _Running
from zeromean.samplers.sampler import Sampler


class _Options(TypedDict, total=False):
    """What all predictions take, for the types of those that return one thing or two."""

    sampler: Sampler | Literal["auto"] | None
    seed: int | None
    chunk_size: int | None
    batch_size: int | None
    select: Callable[[Any], Tensor] | None


def sample_outputs(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    sampler: Sampler | Literal["auto"] | None = None,
    seed: int | None = None,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    differentiable: bool = False,
) -> Tensor:
    """Outputs of the random network, `(num_samples, batch, …)`.

    With `sampler=zm.weight` each sample is one network applied to the whole batch, also where a
    layer is called twice.

    Args:
        model: Any module. What it draws noise with, stochastic layers and Dropout, is on.
        inputs: A tensor, a tuple of positional or a mapping of keyword arguments. Or a DataLoader
            that gives one of these, or `(inputs, targets)`, a batch, in a fixed order: it is read
            once, and its inputs are kept in memory.
        num_samples: Draws of the noise.
        sampler: How every stochastic layer draws, in place of its own way (`zm.weight`, `zm.mean`,
            …); "auto" lets dense layers on vectors draw weights where that is cheaper.
        seed: Makes the draw reproducible, for the same model, inputs, chunk and batch size, without
            touching the global generator.
        chunk_size: Samples that run at once. Default: so many that more samples need no more
            memory.
        batch_size: Objects, along dimension 0 of inputs and outputs, that run at once. Default:
            all. A sample is one network for all of them where weights are drawn (`zm.weight`).
            Inputs whose length is that of the first one are split alike, others go to every batch
            as they are. One that only happens to be as long, and is not by object, needs
            `unsqueeze(0)`.
        select: Picks a tensor from what the model returns. Default: the tensor itself, or what is
            called `logits` in a mapping, a named tuple or a dataclass (Hugging Face's outputs).
        differentiable: Keep the graph, for gradients through the samples.
    """
    chunks: list[Tensor] = []
    draw_outputs(
        model,
        inputs,
        num_samples,
        chunks.append,
        sampler=sampler,
        seed=seed,
        chunk_size=chunk_size,
        batch_size=batch_size,
        select=select,
        differentiable=differentiable,
    )
    return torch.cat(chunks)


@overload
def predict_proba(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    return_stderr: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def predict_proba(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    return_stderr: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


def predict_proba(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    sampler: Sampler | Literal["auto"] | None = None,
    seed: int | None = None,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    return_stderr: bool = False,
) -> Any:
    """Class probabilities averaged over the samples, `(batch, classes)`.

    With `link="sigmoid"` the probability of yes for every output, in the shape of the outputs.

    Args:
        model: Any module. What it draws noise with, stochastic layers and Dropout, is on.
        inputs: A tensor, a tuple of positional or a mapping of keyword arguments. Or a DataLoader
            that gives one of these, or `(inputs, targets)`, a batch, in a fixed order: it is read
            once, and its inputs are kept in memory.
        num_samples: Draws of the noise.
        dim: Dimension of the classes in the model's output; a sigmoid has none.
        link: "softmax" where an object is of one of several classes, "sigmoid" where every output
            says yes or no by itself: one logit of two classes, or many labels.
        outputs: "logits" or "probabilities": what the model returns. Default: logits, which the
            logarithms of probabilities (nn.LogSoftmax) are too; where the model ends in nn.Softmax
            or nn.Sigmoid, or all outputs lie in [0, 1] and sum to 1, an error asks.
        sampler: How every stochastic layer draws, in place of its own way (`zm.weight`, `zm.mean`,
            …); "auto" lets dense layers on vectors draw weights where that is cheaper.
        seed: Makes the draw reproducible, for the same model, inputs, chunk and batch size, without
            touching the global generator.
        chunk_size: Samples that run at once. Default: so many that more samples need no more
            memory.
        batch_size: Objects, along dimension 0 of inputs and outputs, that run at once. Default:
            all. A sample is one network for all of them where weights are drawn (`zm.weight`).
            Inputs whose length is that of the first one are split alike, others go to every batch
            as they are. One that only happens to be as long, and is not by object, needs
            `unsqueeze(0)`.
        select: Picks a tensor from what the model returns. Default: the tensor itself, or what is
            called `logits` in a mapping, a named tuple or a dataclass (Hugging Face's outputs).
        return_stderr: Return `(probabilities, standard errors)`.
    """
    if return_stderr:
        _require_several("return_stderr=True", num_samples)
    running = _Running(spread=return_stderr)
    probabilities_of = _to_probabilities(model, inputs, dim, link, outputs, select)
    draw_outputs(
        model,
        inputs,
        num_samples,
        lambda chunk: running.update(probabilities_of(chunk)),
        sampler=sampler,
        seed=seed,
        chunk_size=chunk_size,
        batch_size=batch_size,
        select=select,
    )
    probabilities_of.finish()
    return (running.mean, running.stderr()) if return_stderr else running.mean


class Likelihood(Protocol):
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
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    likelihood: Likelihood | None = None,
    return_stderr: Literal[False] = False,
    **options: Unpack[_Options],
) -> PredictiveMoments: ...


@overload
def predict_moments(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    likelihood: Likelihood | None = None,
    return_stderr: Literal[True],
    **options: Unpack[_Options],
) -> tuple[PredictiveMoments, PredictiveMoments]: ...


def predict_moments(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    likelihood: Likelihood | None = None,
    sampler: Sampler | Literal["auto"] | None = None,
    seed: int | None = None,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    return_stderr: bool = False,
) -> Any:
    """Mean, aleatoric and epistemic variance of a regression.

    Args:
        model: Any module. What it draws noise with, stochastic layers and Dropout, is on.
        inputs: A tensor, a tuple of positional or a mapping of keyword arguments. Or a DataLoader
            that gives one of these, or `(inputs, targets)`, a batch, in a fixed order: it is read
            once, and its inputs are kept in memory.
        num_samples: Draws of the noise.
        likelihood: The likelihood of the training (`zm.GaussianLikelihood` or
            `zm.HeteroscedasticGaussianLikelihood`). Without one the aleatoric variance is zero.
        sampler: How every stochastic layer draws, in place of its own way (`zm.weight`, `zm.mean`,
            …); "auto" lets dense layers on vectors draw weights where that is cheaper.
        seed: Makes the draw reproducible, for the same model, inputs, chunk and batch size, without
            touching the global generator.
        chunk_size: Samples that run at once. Default: so many that more samples need no more
            memory.
        batch_size: Objects, along dimension 0 of inputs and outputs, that run at once. Default:
            all. A sample is one network for all of them where weights are drawn (`zm.weight`).
            Inputs whose length is that of the first one are split alike, others go to every batch
            as they are. One that only happens to be as long, and is not by object, needs
            `unsqueeze(0)`.
        select: Picks a tensor from what the model returns. Default: the tensor itself, or what is
            called `logits` in a mapping, a named tuple or a dataclass (Hugging Face's outputs).
        return_stderr: Return `(moments, standard errors)`, the latter in the same form.
    """
    _require_several("predict_moments", num_samples)
    _require_likelihood(likelihood)
    means, noises = _Running(spread=True, keep=return_stderr), _Running(spread=return_stderr)

    def consume(outputs: Tensor) -> None:
        if likelihood is None:
            mean, noise = outputs, torch.zeros_like(outputs)
        else:
            mean, log_variance = likelihood.mean_and_log_variance(outputs)
            noise = log_variance.exp()
        means.update(mean)
        noises.update(noise)

    draw_outputs(
        model,
        inputs,
        num_samples,
        consume,
        sampler=sampler,
        seed=seed,
        chunk_size=chunk_size,
        batch_size=batch_size,
        select=select,
    )
    moments = PredictiveMoments(means.mean, noises.mean, means.variance())
    if not return_stderr:
        return moments
    # The variance is an average of squared deviations: its error is theirs.
    squares = (means.kept() - means.mean).square()
    spread = squares.std(0) / math.sqrt(num_samples)
    return moments, PredictiveMoments(means.stderr(), noises.stderr(), spread)


class PredictiveUncertainty(NamedTuple):
    """Entropies of a classification in nats: total = aleatoric + epistemic."""

    predictive_entropy: Tensor
    """Entropy of the averaged probabilities: the total uncertainty."""
    expected_entropy: Tensor
    """Average entropy of the samples' probabilities: noise in the data."""
    mutual_information: Tensor
    """Their difference, never negative: how much the samples disagree."""


@overload
def predictive_uncertainty(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    return_stderr: Literal[False] = False,
    **options: Unpack[_Options],
) -> PredictiveUncertainty: ...


@overload
def predictive_uncertainty(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    return_stderr: Literal[True],
    **options: Unpack[_Options],
) -> tuple[PredictiveUncertainty, PredictiveUncertainty]: ...


def predictive_uncertainty(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    sampler: Sampler | Literal["auto"] | None = None,
    seed: int | None = None,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    return_stderr: bool = False,
) -> Any:
    """Predictive entropy, expected entropy and mutual information of every object, in nats.

    With `link="sigmoid"` those of every yes or no, in the shape of the outputs.

    Args:
        model: Any module. What it draws noise with, stochastic layers and Dropout, is on.
        inputs: A tensor, a tuple of positional or a mapping of keyword arguments. Or a DataLoader
            that gives one of these, or `(inputs, targets)`, a batch, in a fixed order: it is read
            once, and its inputs are kept in memory.
        num_samples: Draws of the noise.
        dim: Dimension of the classes in the model's output; a sigmoid has none.
        link: "softmax" where an object is of one of several classes, "sigmoid" where every output
            says yes or no by itself: one logit of two classes, or many labels.
        outputs: "logits" or "probabilities": what the model returns. Default: logits, which the
            logarithms of probabilities (nn.LogSoftmax) are too; where the model ends in nn.Softmax
            or nn.Sigmoid, or all outputs lie in [0, 1] and sum to 1, an error asks.
        sampler: How every stochastic layer draws, in place of its own way (`zm.weight`, `zm.mean`,
            …); "auto" lets dense layers on vectors draw weights where that is cheaper.
        seed: Makes the draw reproducible, for the same model, inputs, chunk and batch size, without
            touching the global generator.
        chunk_size: Samples that run at once. Default: so many that more samples need no more
            memory.
        batch_size: Objects, along dimension 0 of inputs and outputs, that run at once. Default:
            all. A sample is one network for all of them where weights are drawn (`zm.weight`).
            Inputs whose length is that of the first one are split alike, others go to every batch
            as they are. One that only happens to be as long, and is not by object, needs
            `unsqueeze(0)`.
        select: Picks a tensor from what the model returns. Default: the tensor itself, or what is
            called `logits` in a mapping, a named tuple or a dataclass (Hugging Face's outputs).
        return_stderr: Return `(uncertainty, standard errors)`, the latter in the same form, by
            the delta method.
    """
    if return_stderr:
        _require_several("return_stderr=True", num_samples)
    probabilities, entropies = _Running(keep=return_stderr), _Running(keep=return_stderr)
    probabilities_of = _to_probabilities(model, inputs, dim, link, outputs, select)

    def consume(chunk: Tensor) -> None:
        chunk = probabilities_of(chunk)
        probabilities.update(chunk)
        entropies.update(probabilities_of.entropy(chunk, samples=True))

    draw_outputs(
        model,
        inputs,
        num_samples,
        consume,
        sampler=sampler,
        seed=seed,
        chunk_size=chunk_size,
        batch_size=batch_size,
        select=select,
    )
    probabilities_of.finish()
    total = probabilities_of.entropy(probabilities.mean, samples=False)
    expected = entropies.mean
    # Jensen makes the difference non-negative; rounding may not.
    uncertainty = PredictiveUncertainty(total, expected, (total - expected).clamp_min(0))
    if not return_stderr:
        return uncertainty
    # To first order the entropy of the average moves with −Σ p log(average).
    surprise = probabilities_of.cross_entropy(
        probabilities.kept(), probabilities.mean, samples=True
    )
    entropy = entropies.kept()
    errors = [t.std(0) / math.sqrt(num_samples) for t in (surprise, entropy, surprise - entropy)]
    return uncertainty, PredictiveUncertainty(*errors)


def _to_probabilities(
    model: nn.Module,
    inputs: InputsOrLoader,
    dim: int,
    link: Link,
    outputs: OutputKind | None,
    select: Callable[[Any], Tensor] | None,
) -> ToProbabilities:
    # What is picked from the outputs need not be what the last module returned.
    shown = model if select is None else None
    return ToProbabilities(
        shown, dim=dim, link=link, outputs=outputs, num_objects=_num_objects(inputs)
    )


def _num_objects(inputs: InputsOrLoader) -> int | Literal["any"] | None:
    """As `ToProbabilities` asks for it: a tensor of one dimension may be one object by itself."""
    if isinstance(inputs, DataLoader):
        return "any"
    first = next((t for t in tree_leaves(as_arguments(inputs)) if isinstance(t, Tensor)), None)
    return None if first is None or first.dim() < 2 else len(first)


def _require_likelihood(likelihood: Any) -> None:
    method = getattr(likelihood, "mean_and_log_variance", None)
    if likelihood is not None and (isinstance(likelihood, type) or not callable(method)):
        raise TypeError(
            "likelihood must have a method mean_and_log_variance(outputs), as "
            f"zm.GaussianLikelihood() has, got {shown(likelihood)}."
        )


def _require_several(what: str, num_samples: int) -> None:
    require_integer("num_samples", num_samples)
    if num_samples < 2:
        raise ValueError(f"{what} needs num_samples of at least 2, got {num_samples}.")
