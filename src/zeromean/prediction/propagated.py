"""Mean and covariance of what a model returns, in one pass and without samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeromean.arguments import require_integer, require_model, shown
from zeromean.layers.blocks import monte_carlo_modes
from zeromean.moments import RandomTensor, propagated
from zeromean.moments.random_tensor import FULL_UP_TO, Diagonal
from zeromean.prediction.inputs import InputsOrLoader, _batches
from zeromean.prediction.monte_carlo import Consumer, _blame, _call, draw_outputs
from zeromean.prediction.running import Running

# Beyond, a covariance is asked for by mistake: its numbers are the square of these.
_MOST_OUTPUTS = 4096


class SampleComparison(NamedTuple):
    """What samples say of the same outputs."""

    mean: Tensor
    """Mean of the samples."""
    variance: Tensor
    """Their variance."""
    mean_error: float
    """Largest difference of the means, in standard deviations of the output."""
    mean_noise: float
    """What that would be, by and large, if both were the same: the noise of the samples."""
    variance_error: float
    """Average over all outputs of the relative difference of the standard deviations."""


class PropagatedMoments(NamedTuple):
    """Moments of the outputs of a random network."""

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    """Between the outputs of an example, along the last dimension: `(*, outputs, outputs)`."""
    comparison: SampleComparison | None


def propagate_moments(
    model: nn.Module,
    inputs: InputsOrLoader,
    *,
    covariance: bool | None = None,
    compare_with_samples: int | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    differentiable: bool = False,
) -> PropagatedMoments:
    """Mean and covariance of the outputs of a random network, in one pass without samples.

    Every activation has a mean and a variance, and is taken as normal; that activations go together
    is kept through dense layers and ReLU. Behind one stochastic layer that is exact but for the
    normal; docs, Moments, has the errors elsewhere, `compare_with_samples` those of your network.

    Args:
        model: Any module of operations that have a rule (`zeromean.moments.register`). What it
            draws noise with, stochastic layers and Dropout, is on.
        inputs: A tensor, a tuple of positional or a mapping of keyword arguments, or a DataLoader.
        covariance: Whether to compute the covariance between outputs. Default: for up to 128
            outputs that come from a dense layer.
        compare_with_samples: Draw so many samples too, and say how far they are.
        seed: Of these samples.
        batch_size: Examples, along dimension 0 of inputs and outputs, that run at once.
        select: Picks a tensor from what the model returns. Default: the tensor itself, or what is
            called `logits`.
        differentiable: Keep the graph, for gradients.
    """
    require_model(model)
    if compare_with_samples is not None:
        require_integer("compare_with_samples", compare_with_samples, at_least=2)
    elif seed is not None:
        raise ValueError("seed= is for compare_with_samples=; moments draw nothing, leave it out.")
    parts = []
    for output in outputs_of(model, inputs, batch_size, select, differentiable=differentiable):
        with torch.set_grad_enabled(differentiable):
            parts.append((*output.moments(), _covariance(output, covariance)))
    means, variances, covariances = zip(*parts, strict=True)
    known = [part for part in covariances if part is not None]
    mean, variance = torch.cat(means), torch.cat(variances)
    comparison = None
    if compare_with_samples is not None:
        options = {"seed": seed, "batch_size": batch_size, "select": select}
        comparison = _compared(model, inputs, compare_with_samples, mean, variance, options)
    return PropagatedMoments(mean, variance, torch.cat(known) if known else None, comparison)


def outputs_of(
    model: nn.Module,
    inputs: InputsOrLoader,
    batch_size: int | None,
    select: Callable[[Any], Tensor] | None,
    *,
    differentiable: bool = False,
) -> Iterator[RandomTensor]:
    """What the model returns for each batch, as means and variances."""
    if batch_size is not None:
        batch_size = require_integer("batch_size", batch_size, at_least=1)
    if select is not None and not callable(select):
        raise TypeError(f"select must be a function of the model's output, got {shown(select)}.")
    batches = _batches(inputs, batch_size)
    needs_examples = None
    if batch_size is not None or isinstance(inputs, DataLoader):
        needs_examples = "a DataLoader" if batch_size is None else "batch_size"
    for batch in batches:
        call = _call(model, [batch], select, needs_examples)
        with torch.set_grad_enabled(differentiable):
            with monte_carlo_modes(model):
                output = propagated(model, call)
            if not isinstance(output, RandomTensor):
                zeros = torch.zeros_like(output)
                output = RandomTensor(output, zeros, Diagonal(zeros))
            mean, variance = output.moments()
            # −inf is a masked class, whose variance is zero; NaN and +inf are nobody's intention.
            if mean.sum().isposinf() or (mean.sum() + variance.sum()).isnan():
                raise ValueError(_blame(model, ""))
        yield output


def _covariance(output: RandomTensor, wanted: bool | None) -> Tensor | None:
    known = output.covariance_of
    size = output.shape[-1] if output.dim() else 1
    if wanted is None:
        wanted = known is not None and size <= FULL_UP_TO
    if not wanted:
        return None
    if known is None:
        raise ValueError(
            "The covariance of these outputs is not known: they do not come from a dense layer "
            "(and sums, products and further dense layers behind it); pass covariance=False."
        )
    if size > _MOST_OUTPUTS:
        raise ValueError(
            f"A full covariance of {size:,} outputs is {size**2:,} numbers for each example; pass "
            f"covariance=False for the variances alone (at most {_MOST_OUTPUTS:,} outputs)."
        )
    return known()


def _compared(
    model: nn.Module,
    inputs: InputsOrLoader,
    num_samples: int,
    mean: Tensor,
    variance: Tensor,
    options: dict[str, Any],
) -> SampleComparison:
    running = Running(spread=True)
    finish = (running.end_network,)
    draw_outputs(model, inputs, num_samples, lambda _: Consumer(running.update, finish), **options)
    sampled, std = running.variance(), running.variance().sqrt()
    random = std > 0
    if not random.any():
        return SampleComparison(running.mean, sampled, 0.0, 0.0, 0.0)
    distance = ((mean.detach() - running.mean).abs()[random] / std[random]).amax()
    ratio = (variance.detach().sqrt()[random] / std[random] - 1).abs().mean()
    noise = (2 * torch.tensor(float(random.sum())).log().clamp_min(0.5)).sqrt()
    expected = float(noise) / num_samples**0.5
    return SampleComparison(running.mean, sampled, float(distance), expected, float(ratio))
