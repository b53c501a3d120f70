"""Dropping the means of layers that have become variance layers, with a bound on the harm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zeromean.arguments import require_integer, require_model, require_predicate, require_seed
from zeromean.distributions.from_posterior import hand_over_
from zeromean.distributions.noise import normal
from zeromean.distributions.posteriors.factorized import FactorizedPosterior, independent
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.distributions.posteriors.zero_mean import ZeroMean
from zeromean.layers.blocks import monte_carlo_modes
from zeromean.layers.embedding import Embedding
from zeromean.layers.linear import Linear
from zeromean.layers.stochastic_layer import StochasticLayer, stochastic_layers
from zeromean.layers.stochastic_module import swapped_samplers
from zeromean.prediction.inputs import Inputs, as_arguments, num_examples_in
from zeromean.prediction.randomness import seeded
from zeromean.samplers.kinds import Draws, drawn_by
from zeromean.samplers.linear_maps import Convolution, LinearMap, LookUp
from zeromean.samplers.sampler import Sampler

# Effective log α above which a layer counts as a variance layer.
VARIANCE_LAYER_LOG_ALPHA = 3.0


@dataclass(frozen=True)
class LayerCertificate:
    """How far a prediction can move when the means of one layer are dropped.

    Attributes:
        weight_space: Total variation between the two weight distributions, erf(√(Σ 1/α / 8)),
            for every draw of them. None where the layer does not draw one weight for all
            positions of an example.
        activation_space: The same for the layer's outputs, for every input: erf(√(Σ m²/v / 8)).
            None without inputs, and where outputs share a draw, in one call or in several.
    """

    weight_space: float | None
    activation_space: Tensor | None

    @property
    def bound(self) -> Tensor:
        """The best bound there is, for every input (or one for all)."""
        best = torch.ones((), dtype=torch.float64, device="cpu")
        if self.weight_space is not None:
            best = best.clamp_max(self.weight_space)
        return best if self.activation_space is None else best.minimum(self.activation_space)


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
    layers on one row for each example. Convolutions under `zm.local` draw noise for every position;
    there only the bound in activation space holds, which needs `inputs` and is usually far
    tighter as well. Where the input of a layer is itself random, that bound is averaged over
    `num_samples` draws of it. BatchNorm behind the layers: see `recalibrate_batchnorm_`.

    Args:
        where: Predicate of name and layer; layers that share a chosen posterior come along.
            Default: layers that have converged, in the sense that the total variance of their
            weights exceeds e³ times the sum of their squared means.
        inputs: Inputs for which the certificate is wanted, with the examples along dimension 0.
            Without them every layer is taken to be called once, Linear ones with one row for each
            example. Convolutions must see the examples along dimension 0 too.
        num_samples: Draws of what comes before a layer.
        seed: Makes these draws reproducible, without touching the global generator.
    """
    require_model(model)
    require_predicate(where)
    num_samples = require_integer("num_samples", num_samples, at_least=1)
    if seed is not None:
        seed = require_seed(seed)
    layers = _layers_to_zero(model, where)
    views = dict.fromkeys(layers, _View())
    if inputs is not None:
        views = _look(model, layers, inputs, num_samples, seed)
    reused = _reused(layers, views)
    certificates = {
        name: _certify(name, layers[name], view, draw_is_reused=layers[name].weight in reused)
        for name, view in views.items()
    }
    replacements = {p: _without_mean(independent(p, "zm.zero_mean_")) for p in _posteriors(layers)}
    for layer in layers.values():
        layer.weight = replacements[layer.weight]
    return Certificate(certificates)


def effective_log_alpha(posterior: Posterior) -> float:
    """log of the total variance over the sum of squared means: how far a layer has converged.

    −∞ for a layer from which everything has been pruned: it has not become a variance layer.
    """
    with torch.no_grad():
        mean, variance = posterior.moments()
        if mean is None:
            return math.inf
        signal, noise = mean.cpu().double().square().sum(), variance.cpu().double().sum()
        if signal == 0:
            return math.inf if noise > 0 else -math.inf
        return float((noise / signal).log())


def _layers_to_zero(
    model: nn.Module, where: Callable[[str, nn.Module], bool] | None
) -> dict[str, StochasticLayer]:
    with_mean = {
        n: m
        for n, m in stochastic_layers(model).items()
        if m.weight.has_mean
        and isinstance(m.weight, FactorizedPosterior)
        and not m.weight.layout.affine
    }
    if where is None:
        log_alpha = {n: effective_log_alpha(m.weight) for n, m in with_mean.items()}
        chosen = {n: m for n, m in with_mean.items() if log_alpha[n] > VARIANCE_LAYER_LOG_ALPHA}
    else:
        chosen = {n: m for n, m in with_mean.items() if where(n, m)}
    shared = _posteriors(chosen)
    chosen = {n: m for n, m in with_mean.items() if m.weight in shared}
    if not with_mean:
        raise ValueError(
            "zero_mean_ found no stochastic layer with means: there is nothing to drop. (Variance "
            "layers have none; LSTM, GRU and noise on units keep theirs.)"
        )
    if not chosen:
        found = ", ".join(f"{n} {effective_log_alpha(m.weight):.1f}" for n, m in with_mean.items())
        raise ValueError(
            "zero_mean_ found no converged layer with means to drop (effective log α: "
            f"{found}; converged above {VARIANCE_LAYER_LOG_ALPHA:g}); train on, or choose with "
            "where=."
        )
    for name, layer in chosen.items():
        if layer.weight.noise is not normal:
            raise ValueError(
                f"The certificate is for normal noise, but {name} has "
                f"{layer.weight.noise.__name__} noise; leave it out with where=."
            )
    return chosen


def _posteriors(layers: dict[str, StochasticLayer]) -> set[Posterior]:
    return {layer.weight for layer in layers.values()}


@dataclass
class _View:
    """What one layer does in a forward pass.

    Attributes:
        activation_space: The bound in activation space for every input, averaged over the draws
            of what comes before the layer.
        calls: How often it is called, and draws.
        one_row: Whether it sees just one row for each example.
    """

    activation_space: Tensor | None = None
    calls: int = 1
    one_row: bool = True


def _look(
    model: nn.Module,
    layers: dict[str, StochasticLayer],
    inputs: Inputs,
    num_samples: int,
    seed: int | None,
) -> dict[str, _View]:
    args, kwargs = as_arguments(inputs)
    num_objects = num_examples_in(args, kwargs)
    if not num_objects:
        raise ValueError("inputs must hold at least one example, got none.")
    totals = {name: torch.zeros(num_objects, dtype=torch.float64, device="cpu") for name in layers}
    views = {name: _View(total, calls=0) for name, total in totals.items()}

    def observed(
        name: str,
        sampler: Sampler,
        op: LinearMap,
        x: Tensor,
        posterior: Posterior,
        bias: Tensor | None = None,
    ) -> Tensor:
        # Where there are as many steps as examples, either may come first: let both count.
        rows = not isinstance(op, Convolution)
        unclear = rows and x.dim() + isinstance(op, LookUp) > 2 and x.shape[1] == num_objects
        distance = _squared_distance(
            *op.moments(x, independent(posterior, "A certificate")), num_objects, unclear=unclear
        )
        # Total variations of independent draws add.
        totals[name] += _total_variation(distance) / num_samples
        views[name].calls += 1
        views[name].one_row &= x.dim() == 2 and len(x) == num_objects
        return sampler(op, x, posterior, bias)

    with ExitStack() as stack:
        stack.enter_context(monte_carlo_modes(model))
        stack.enter_context(torch.no_grad())
        if seed is not None:
            stack.enter_context(seeded(seed, model))
        observers = {m: partial(observed, name, m.sampler) for name, m in layers.items()}
        stack.enter_context(swapped_samplers(observers))
        for _ in range(num_samples):
            model(*args, **kwargs)
    for view in views.values():
        view.calls = math.ceil(view.calls / num_samples)
    return views


def _reused(layers: dict[str, StochasticLayer], views: dict[str, _View]) -> set[Posterior]:
    """Posteriors of which several calls see the same draw.

    Predictions draw a weight once, however often it is used. Look-ups alone do no harm: rows that
    are looked up twice count twice.
    """
    by_weight = {
        name: layer for name, layer in layers.items() if drawn_by(layer.sampler) is Draws.WEIGHTS
    }
    calls: Counter[Posterior] = Counter()
    for name, layer in by_weight.items():
        calls[layer.weight] += views[name].calls
    multiplied = {m.weight for m in by_weight.values() if not isinstance(m, Embedding)}
    return {posterior for posterior in multiplied if calls[posterior] > 1}


def _certify(
    name: str, layer: StochasticLayer, view: _View, *, draw_is_reused: bool
) -> LayerCertificate:
    """Keep the bounds that hold for what the layer's outputs share.

    An example's outputs are independent where each is drawn by itself, and where different weights
    make them (one row of a Linear, the columns of an Embedding); else Σ m²/v ignores what the
    shared noise cancels. Flipout is a draw of weights for as long as an example keeps its signs.
    """
    drawn = drawn_by(layer.sampler)
    lone_row = isinstance(layer, Linear) and view.one_row
    looks_up = isinstance(layer, Embedding)
    by_output = drawn is Draws.OUTPUTS
    by_weight = drawn is Draws.WEIGHTS
    keeps_signs = not looks_up and (lone_row or not isinstance(layer, Linear))
    by_object = drawn is Draws.FLIPPED_WEIGHTS and keeps_signs
    weight_space = activation_space = None
    if by_weight or by_object or (by_output and lone_row):
        one_draw = float(
            _total_variation(_weight_space_distance(independent(layer.weight, "A certificate")))
        )
        weight_space = min(view.calls * one_draw, 1.0) if view.calls else 0.0
    if by_output or (lone_row and (by_weight or by_object)) or (looks_up and by_weight):
        activation_space = None if draw_is_reused else view.activation_space
    certificate = LayerCertificate(weight_space, activation_space)
    if certificate.bound.isnan().any():
        raise ValueError(
            f"The inputs and the parameters must be finite, but {name} has NaN or infinite means "
            "or variances; clean the inputs, or go back to a sound checkpoint."
        )
    return certificate


def _total_variation(squared_distance: Tensor) -> Tensor:
    """Total variation of two normals whose means are so far apart, in standard deviations."""
    return torch.erf((squared_distance / 8).sqrt())


def _weight_space_distance(posterior: FactorizedPosterior) -> Tensor:
    with torch.no_grad():
        inverse_alpha = (-posterior.log_alpha_per_weight().cpu().double()).exp()
        row = posterior.layout.noiseless_row
        mean, _ = posterior.mean_and_scale()
        if row is not None and mean is not None:
            # Without noise a dropped mean shows, unless it was zero.
            inverse_alpha[row] = torch.where(mean[row].cpu() == 0, 0.0, math.inf).double()
        return inverse_alpha.sum()


def _squared_distance(
    mean: Tensor | None, variance: Tensor, num_objects: int, *, unclear: bool
) -> Tensor:
    """Σ mean²/variance over the activations of every example; nothing where the mean is zero."""
    if mean is None:
        return torch.zeros(num_objects, dtype=torch.float64, device="cpu")
    signal, variance = mean.cpu().double().square(), variance.cpu().double()
    ratio = torch.where(signal == 0, 0.0, signal / variance)
    ratio = torch.where(variance.isfinite(), ratio, math.nan)
    if len(ratio) != num_objects or unclear:
        # Whose activations these are is not known: let them all count for every example.
        return ratio.sum().expand(num_objects)
    return ratio.reshape(num_objects, -1).sum(1)


def _without_mean(posterior: FactorizedPosterior) -> ZeroMean:
    _, scale = posterior.mean_and_scale()
    # On the meta device nothing is drawn for initial values that nobody needs.
    zero_mean = ZeroMean(
        posterior.shape,
        noise=posterior.noise,
        layout=posterior.layout,
        device="meta",
        dtype=posterior.dtype,
    ).to_empty(device=posterior.device)
    with torch.no_grad():
        zero_mean.scale.copy_(scale)
    zero_mean.mask = posterior.mask
    hand_over_(posterior, zero_mean)
    learns = any(parameter.requires_grad for parameter in posterior.parameters())
    return zero_mean.requires_grad_(learns)
