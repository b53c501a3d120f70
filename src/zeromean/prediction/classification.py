"""Classes: probabilities averaged over the samples, and how uncertain they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from zeromean.prediction.by_moments import (
    Method,
    Outputs,
    probabilities,
    wants_moments,
)
from zeromean.prediction.inputs import InputsOrLoader, as_arguments
from zeromean.prediction.monte_carlo import Consumer, draw_outputs
from zeromean.prediction.options import Options, require_several
from zeromean.prediction.probabilities import (
    Link,
    OutputKind,
    ToProbabilities,
    cross_entropy,
    sample_dim,
)
from zeromean.prediction.running import Running
from zeromean.prediction.sources import Source
from zeromean.samplers.sampler import Sampler


@overload
def predict_proba(
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    return_stderr: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def predict_proba(
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    return_stderr: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


def predict_proba(
    model: Source,
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
    devices: int | None = None,
    return_stderr: bool = False,
    method: Method = "samples",
) -> Any:
    """Class probabilities averaged over the samples, `(batch, classes)`.

    With `link="sigmoid"` the probability of yes for every output, in the shape of the outputs.

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
        dim: Dimension of the classes in the model's output; a sigmoid has none.
        link: "softmax" where an example is of one of several classes, "sigmoid" where every output
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
        batch_size: Examples, along dimension 0 of inputs and outputs, that run at once. Default:
            all. A sample is one network for all of them where weights are drawn (`zm.weight`).
            Inputs whose length is that of the first one are split alike, others go to every batch
            as they are. One that only happens to be as long, and is not by example, needs
            `unsqueeze(0)`.
        select: Picks a tensor from what the model returns. Default: the tensor itself, or what is
            called `logits` in a mapping, a named tuple or a dataclass (Hugging Face's outputs).
        devices: Processes that share the samples; with a seed the numbers do not depend on how many
            there are. A script needs `if __name__ == "__main__":`.
        return_stderr: Return `(probabilities, standard errors)`.
    """
    if wants_moments(method, sampler, seed, chunk_size, devices, return_stderr):
        sought = Outputs(model, inputs, batch_size, select)
        return probabilities(
            sought, lambda n: _to_probabilities(n, inputs, dim, link, outputs, select)
        )[0]
    if return_stderr:
        require_several("return_stderr=True", num_samples)
    running = Running(spread=return_stderr)

    def consumer(network: nn.Module) -> Consumer:
        probabilities_of = _to_probabilities(network, inputs, dim, link, outputs, select)
        return Consumer(
            take=lambda chunk: running.update(probabilities_of(chunk)),
            finish=(probabilities_of.finish, running.end_network),
        )

    draw_outputs(
        model,
        inputs,
        num_samples,
        consumer,
        sampler=sampler,
        seed=seed,
        chunk_size=chunk_size,
        batch_size=batch_size,
        select=select,
        devices=devices,
    )
    return (running.mean, running.stderr()) if return_stderr else running.mean


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
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    return_stderr: Literal[False] = False,
    **options: Unpack[Options],
) -> PredictiveUncertainty: ...


@overload
def predictive_uncertainty(
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    dim: int = -1,
    link: Link = "softmax",
    outputs: OutputKind | None = None,
    return_stderr: Literal[True],
    **options: Unpack[Options],
) -> tuple[PredictiveUncertainty, PredictiveUncertainty]: ...


def predictive_uncertainty(
    model: Source,
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
    devices: int | None = None,
    return_stderr: bool = False,
    method: Method = "samples",
) -> Any:
    """Predictive entropy, expected entropy and mutual information of every example, in nats.

    With `link="sigmoid"` those of every yes or no, in the shape of the outputs.

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
        dim: Dimension of the classes in the model's output; a sigmoid has none.
        link: "softmax" where an example is of one of several classes, "sigmoid" where every output
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
        batch_size: Examples, along dimension 0 of inputs and outputs, that run at once. Default:
            all. A sample is one network for all of them where weights are drawn (`zm.weight`).
            Inputs whose length is that of the first one are split alike, others go to every batch
            as they are. One that only happens to be as long, and is not by example, needs
            `unsqueeze(0)`.
        select: Picks a tensor from what the model returns. Default: the tensor itself, or what is
            called `logits` in a mapping, a named tuple or a dataclass (Hugging Face's outputs).
        devices: Processes that share the samples; with a seed the numbers do not depend on how many
            there are. A script needs `if __name__ == "__main__":`.
        return_stderr: Return `(uncertainty, standard errors)`, the latter in the same form, by
            the delta method.
    """
    if wants_moments(method, sampler, seed, chunk_size, devices, return_stderr):
        sought = Outputs(model, inputs, batch_size, select)
        average, expected = probabilities(
            sought, lambda n: _to_probabilities(n, inputs, dim, link, outputs, select)
        )
        if expected is None:
            raise ValueError(
                "The expected entropy of probabilities has no moments; let the model return "
                "logits, or use method='samples'."
            )
        return _uncertainty(average, expected, link, dim)
    if return_stderr:
        require_several("return_stderr=True", num_samples)
    averages, entropies = Running(keep=return_stderr), Running(keep=return_stderr)

    def consumer(network: nn.Module) -> Consumer:
        probabilities_of = _to_probabilities(network, inputs, dim, link, outputs, select)

        def take(chunk: Tensor) -> None:
            chunk = probabilities_of(chunk)
            averages.update(chunk)
            entropies.update(cross_entropy(chunk, chunk, link, sample_dim(dim)))

        finish = (probabilities_of.finish, averages.end_network, entropies.end_network)
        return Consumer(take, finish)

    draw_outputs(
        model,
        inputs,
        num_samples,
        consumer,
        sampler=sampler,
        seed=seed,
        chunk_size=chunk_size,
        batch_size=batch_size,
        select=select,
        devices=devices,
    )
    average = averages.mean
    uncertainty = _uncertainty(average, entropies.mean, link, dim)
    if not return_stderr:
        return uncertainty
    # To first order the entropy of the average moves with −Σ p log(average).
    surprise = cross_entropy(averages.kept(), average, link, sample_dim(dim))
    entropy = entropies.kept()
    errors = map(averages.stderr_of, (surprise, entropy, surprise - entropy))
    return uncertainty, PredictiveUncertainty(*errors)


def _uncertainty(average: Tensor, expected: Tensor, link: Link, dim: int) -> PredictiveUncertainty:
    total = cross_entropy(average, average, link, dim)
    # Jensen makes the difference non-negative; rounding may not.
    return PredictiveUncertainty(total, expected, (total - expected).clamp_min(0))


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
        shown, dim=dim, link=link, outputs=outputs, num_examples=_num_examples(inputs)
    )


def _num_examples(inputs: InputsOrLoader) -> int | Literal["any"] | None:
    """As `ToProbabilities` asks for it: a tensor of one dimension may be one example by itself."""
    if isinstance(inputs, DataLoader):
        return "any"
    first = next((t for t in tree_leaves(as_arguments(inputs)) if isinstance(t, Tensor)), None)
    return None if first is None or first.dim() < 2 else len(first)
