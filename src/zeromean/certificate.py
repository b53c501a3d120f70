"""Dropping the means of layers that have become variance layers, with a bound on the harm."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zeromean.layers import Linear, StochasticLayer
from zeromean.monte_carlo import Inputs, as_arguments, seeded
from zeromean.noise import normal
from zeromean.objectives import stochastic_layers
from zeromean.posteriors import Posterior, ZeroMean
from zeromean.samplers import flipout, weight
from zeromean.sampling import monte_carlo_modes


@dataclass(frozen=True)
class LayerCertificate:
    """How far a prediction can move when the means of one layer are dropped.

    Attributes:
        weight_space: Total variation between the two weight distributions, erf(√(Σ 1/α / 8)).
            None where the layer draws noise for every position, which it does not cover.
        activation_space: The same for the layer's outputs, for every input: erf(√(Σ m²/v / 8)).
            None without inputs.
    """

    weight_space: float | None
    activation_space: Tensor | None

    @property
    def bound(self) -> Tensor:
        """The best bound there is, for every input (or one for all)."""
        bounds = [] if self.weight_space is None else [torch.tensor(self.weight_space)]
        if self.activation_space is not None:
            bounds.append(self.activation_space)
        return torch.stack(torch.broadcast_tensors(*bounds)).amin(0) if bounds else torch.ones(())


@dataclass(frozen=True)
class Certificate:
    """A bound on the change of every predicted probability; the layers' bounds add."""

    layers: dict[str, LayerCertificate]

    @property
    def per_input(self) -> Tensor:
        """The bound for every input, or one number without inputs."""
        total = torch.stack(torch.broadcast_tensors(*(c.bound for c in self.layers.values())))
        return total.sum(0).clamp_max(1.0)

    @property
    def bound(self) -> float:
        """No predicted probability, averaged over the noise, changes by more than this."""
        return float(self.per_input.max())


def zero_mean_(
    model: nn.Module,
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    inputs: Inputs | None = None,
    num_samples: int = 20,
    seed: int | None = None,
) -> Certificate:
    """Replace posteriors by zero-mean ones of the same variance, in place; returns a certificate.

    Theorem 1 of Neklyudov et al. (2019) with the exact total variation in place of its bound:
    the averaged probability of any class moves by at most `certificate.bound`. In weight space
    the bound holds for weights that are drawn once for all positions: `zm.weight`, or Linear
    layers on one row for each object. Convolutions under `zm.local` draw noise for every position;
    there only the bound in activation space holds, which needs `inputs` and is usually far
    tighter as well. Where the input of a layer is itself random, that bound is averaged over
    `num_samples` draws of it. BatchNorm behind the layers: see `recalibrate_batchnorm_`.

    Args:
        where: Predicate of name and layer. Default: layers that have converged, in the sense that
            the total variance of their weights exceeds e³ times the sum of their squared means.
        inputs: Inputs for which the certificate is wanted. Without them Linear layers are taken
            to see one row for each object.
    """
    layers = _layers_to_zero(model, where)
    activation_space, one_row = {}, {}
    if inputs is not None:
        activation_space, one_row = _activation_bounds(model, layers, inputs, num_samples, seed)
    certificates = {
        name: LayerCertificate(
            _weight_space_bound(layer, one_row.get(name, True)), activation_space.get(name)
        )
        for name, layer in layers.items()
    }
    replacements: dict[Posterior, ZeroMean] = {}
    for layer in layers.values():
        if layer.weight not in replacements:
            replacements[layer.weight] = _without_mean(layer.weight)
    # A posterior may be shared with a layer under another name.
    for layer in stochastic_layers(model).values():
        layer.weight = replacements.get(layer.weight, layer.weight)
    return Certificate(certificates)


def effective_log_alpha(posterior: Posterior) -> float:
    """log of the total variance over the sum of squared means: how far a layer has converged."""
    with torch.no_grad():
        mean, variance = posterior.moments()
        if mean is None:
            return math.inf
        signal = mean.double().square().sum()
        return float((variance.double().sum() / signal).log()) if signal > 0 else math.inf


def _layers_to_zero(
    model: nn.Module, where: Callable[[str, nn.Module], bool] | None
) -> dict[str, StochasticLayer]:
    with_mean = {n: m for n, m in stochastic_layers(model).items() if m.weight.has_mean}
    if where is None:
        chosen = {n: m for n, m in with_mean.items() if effective_log_alpha(m.weight) > 3}
    else:
        chosen = {n: m for n, m in with_mean.items() if where(n, m)}
    if not chosen:
        found = ", ".join(f"{n} {effective_log_alpha(m.weight):.1f}" for n, m in with_mean.items())
        raise ValueError(
            "zero_mean_ found no converged layer with means to drop (effective log α: "
            f"{found or 'no stochastic layer has means'}; converged above 3); train on, or choose "
            "with where=."
        )
    for name, layer in chosen.items():
        if layer.weight.noise is not normal:
            raise ValueError(
                f"The certificate is for normal noise, but {name} has "
                f"{layer.weight.noise.__name__} noise."
            )
    return chosen


def _weight_space_bound(layer: StochasticLayer, one_row: bool) -> float | None:
    shares_weights = layer.sampler is weight or (
        layer.sampler is flipout and not isinstance(layer, Linear)
    )
    if not (shares_weights or (isinstance(layer, Linear) and one_row)):
        return None
    with torch.no_grad():
        inverse_alpha = (-layer.weight.log_alpha_per_weight().double()).exp().sum()
    return float(torch.erf((inverse_alpha / 8).sqrt()))


def _activation_bounds(
    model: nn.Module,
    layers: dict[str, StochasticLayer],
    inputs: Inputs,
    num_samples: int,
    seed: int | None,
) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """The activation-space bound of every layer for every input, averaged over draws of what
    comes before the layer; and whether the layer sees just one row for each object.
    """
    args, kwargs = as_arguments(inputs)
    num_objects = len(next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)))
    totals: dict[str, Tensor] = {}
    distances: dict[str, Tensor] = {}
    one_row: dict[str, bool] = {}

    def observe(name: str, layer: StochasticLayer, arguments: tuple[Tensor, ...]) -> None:
        x = layer.prepare(arguments[0])
        mean, variance = layer.linear_map().moments(x, layer.weight)
        distance = _squared_distance(mean, variance, num_objects)
        # A layer that is called twice draws twice: squared distances of independent draws add.
        distances[name] = distances[name] + distance if name in distances else distance
        one_row[name] = x.dim() == 2 and len(x) == num_objects

    with ExitStack() as stack:
        stack.enter_context(monte_carlo_modes(model))
        stack.enter_context(torch.no_grad())
        if seed is not None:
            stack.enter_context(seeded(seed, model))
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(partial(observe, name))
            stack.callback(handle.remove)
        for _ in range(num_samples):
            model(*args, **kwargs)
            for name, distance in distances.items():
                bound = torch.erf((distance / 8).sqrt()) / num_samples
                totals[name] = totals[name] + bound if name in totals else bound
            distances.clear()
    return totals, one_row


def _squared_distance(mean: Tensor | None, variance: Tensor, num_objects: int) -> Tensor:
    """Σ mean²/variance over the activations of every object; nothing where both are zero."""
    if mean is None:
        return variance.new_zeros(num_objects)
    signal = mean.square()
    ratio = torch.where(signal > 0, signal / variance, 0.0)
    return ratio.reshape(num_objects, -1).sum(1)


def _without_mean(posterior: Posterior) -> ZeroMean:
    _, scale = posterior.mean_and_scale()
    zero_mean = ZeroMean(
        posterior.shape,
        noise=posterior.noise,
        layout=posterior.layout,
        device=posterior.device,
        dtype=posterior.dtype,
    )
    with torch.no_grad():
        zero_mean.scale.copy_(scale)
    return zero_mean
