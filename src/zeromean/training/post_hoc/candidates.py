"""The candidates, the cheap ones first, each judged before the next is made."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from zeromean.conversion.batchnorm import batchnorms, recalibrate_batchnorm_
from zeromean.conversion.make_stochastic import make_stochastic_
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.priors import Normal
from zeromean.samplers.weights import weight as draw_weights
from zeromean.training.config import TrainingConfig
from zeromean.training.data_sources import Data, evaluation_batches
from zeromean.training.devices import Accelerator, device_of
from zeromean.training.mini_batches import split_batch
from zeromean.training.post_hoc.calibrated import WithVariance
from zeromean.training.post_hoc.contest import Contest
from zeromean.training.post_hoc.examples import Examples, moved
from zeromean.training.post_hoc.last_layer import Head, Laplace, head_of, variance_head
from zeromean.training.post_hoc.layer_sets import FEWEST_SAMPLES, Calls, LayerCall, calls_of
from zeromean.training.post_hoc.tasks import Numbers, Task, samples_of
from zeromean.training.trainer import fit

if TYPE_CHECKING:
    from zeromean.data.batches import Augmentation, EpochAugmentation

# Standard deviations of the prior of the last layer, in those of its weights.
PRIOR_SCALES = (0.3, 1.0, 3.0, 10.0)
# log(σ² / μ²) of the weights, tried on the trained network as it is.
NOISE_LEVELS = (-3.5, -2.5, -1.5, -0.5)
# Of the standard deviation that fine-tuning ends with.
NOISE_FACTORS = (0.5, 1.0, 2.0)
# Batches of the training set from which BatchNorm's statistics are taken anew.
RECALIBRATED_ON = 20


@dataclass(frozen=True)
class Call:
    """What `add_uncertainty` was asked for."""

    train: Data
    task: Task
    has_variance: bool
    config: TrainingConfig
    num_data: int
    max_cost: float
    num_samples: int
    kl_weights: tuple[float, ...]
    augment: Augmentation | EpochAugmentation | None
    accelerator: Accelerator
    folder: Path
    progress: bool


def contest_of(model: nn.Module, call: Call, chooses: Examples, seed: int) -> Contest:
    """Make and judge all candidates for a trained network, which is left as it is."""
    task = call.task
    calls = calls_of(model, chooses.first(2).inputs)
    head = None
    if calls.layers:
        batches = evaluation_batches(call.train)
        head = head_of(model, calls.layers[-1].name, batches, call.num_data)
    base = model
    if isinstance(task, Numbers) and not call.has_variance:
        residuals = samples_of(model, chooses.inputs, None, seed)[0] - chooses.targets
        noise = residuals.square().mean(0).clamp_min(1e-30).log()
        base = WithVariance(copy.deepcopy(model), task.num_outputs, noise)
    contest = Contest(task, chooses, base, seed=seed)
    if base is not model:
        base, head = _with_variances(base, model, head, contest)
    calls = calls_of(base, chooses.first(2).inputs)
    if not calls.layers:
        return contest
    if head is not None:
        _enter_laplace(contest, base, head, calls, call)
    choices = _choices(calls, call)
    noise = _enter_noise(contest, base, calls, choices, passes=0)
    _enter_tuned(contest, base, noise, calls, call)
    return contest


def _with_variances(
    base: nn.Module, model: nn.Module, head: Head | None, contest: Contest
) -> tuple[nn.Module, Head | None]:
    """A regression with a variance by input, where that is better than one for all."""
    found = None if head is None else variance_head(model, head)
    if found is None:
        return base, None
    by_input, wider = found
    nll = contest.enter("noise by input", by_input, None, cost=1.0, passes=0.0)
    if nll < contest.first.row.nll:
        return by_input, wider
    assert head is not None
    return variance_head(model, head, by_input=False) or (base, None)


def _enter_laplace(contest: Contest, base: nn.Module, head: Head, calls: Calls, call: Call) -> None:
    laplace = Laplace(base, head, call.task)
    num_samples = _choices(calls, call)[1]
    cost = calls.cost(1, num_samples)
    for scale in PRIOR_SCALES:
        name = f"layer {head.name}: Laplace, prior of {scale:g} times its weights"
        contest.enter(name, laplace.candidate(scale), num_samples, cost=cost, passes=0.0)


@dataclass(frozen=True, order=True)
class Noise:
    """How good noise on trained weights was: on how many of the last layers, how much, samples."""

    nll: float
    count: int
    level: float
    num_samples: int


def _enter_noise(
    contest: Contest,
    base: nn.Module,
    calls: Calls,
    choices: Mapping[int, int],
    *,
    passes: int,
) -> Noise:
    """Noise on the weights as they are, from little to much; returns the best."""
    found: list[Noise] = []
    for count, num_samples in choices.items():
        nll = math.inf
        for level in NOISE_LEVELS:
            before = nll
            random = _random(base, calls.last(count), level)
            name = f"{_layers(calls, count)}: noise of {math.exp(level / 2):.0%} of weights"
            cost = calls.cost(count, num_samples)
            nll = contest.enter(_after(name, passes), random, num_samples, cost=cost, passes=passes)
            found.append(Noise(nll, count, level, num_samples))
            if nll > before:
                break  # More of it will not be better.
    return min(found)


def _enter_tuned(contest: Contest, base: nn.Module, noise: Noise, calls: Calls, call: Call) -> None:
    """Train on in several ways for a few passes each, then in the best one for the rest.

    Either nothing is random meanwhile, and noise comes afterwards; or the best noise so far is
    there from the start, and the KL term, in one weight or another, changes how much it is.
    """
    budget = call.config.epochs
    pilot = budget // (2 * (1 + len(call.kl_weights))) if call.kl_weights else 0
    # Where there is one way, or too few passes to compare several, it gets them all.
    weights = (None, *call.kl_weights) if pilot else (None,)
    pilot = pilot or budget
    tried = []
    for place, weight in enumerate(weights):
        start = base if weight is None else _random(base, calls.last(noise.count), noise.level)
        model = _tuned(start, call, weight, pilot, f"{place}")
        nll = _enter_way(contest, model, weight, noise, calls, pilot)
        tried.append((nll, place, model))
    _, place, model = min(tried, key=lambda each: each[0])
    passes = budget - pilot * (len(weights) - 1)
    if passes > pilot:
        model = _tuned(model, call, weights[place], passes - pilot, f"{place}-on")
        _enter_way(contest, model, weights[place], noise, calls, passes)


def _enter_way(
    contest: Contest,
    model: nn.Module,
    weight: float | None,
    noise: Noise,
    calls: Calls,
    passes: int,
) -> float:
    """What has been trained on, with its noise or with more or less of it; the best of these."""
    if weight is None:
        contest.enter(_after("nothing random", passes), model, None, cost=1.0, passes=passes)
        choices = {noise.count: noise.num_samples}
        return _enter_noise(contest, model, calls, choices, passes=passes).nll
    cost = calls.cost(noise.count, noise.num_samples)
    found = []
    for factor in NOISE_FACTORS:
        name = f"{_layers(calls, noise.count)}: KL weight {weight:g}"
        name += "" if factor == 1 else f", {factor:g} times its noise"
        scaled = _scaled(model, factor)
        found.append(
            contest.enter(_after(name, passes), scaled, noise.num_samples, cost=cost, passes=passes)
        )
    return min(found)


def _after(name: str, passes: int) -> str:
    return f"{name}, trained on" if passes else name


def _tuned(model: nn.Module, call: Call, weight: float | None, epochs: int, name: str) -> nn.Module:
    """A copy that has been trained on, with BatchNorm's statistics under its noise, if any.

    Running averages of the last few batches alone would be another kind of noise.
    """
    model = copy.deepcopy(model)
    warmup = min(call.config.kl_warmup_epochs, epochs)
    fit(
        model,
        call.train,
        replace(call.config, epochs=epochs, beta=weight or 0.0, kl_warmup_epochs=warmup),
        folder=call.folder / name,
        likelihood=call.task.likelihood,
        accelerator=call.accelerator,
        augment=call.augment,
        progress=call.progress,
    )
    model.eval()
    if batchnorms(model):
        device = device_of(model)
        batches = (split_batch(batch)[0] for batch in evaluation_batches(call.train))
        recalibrate_batchnorm_(
            model, (moved(inputs, device) for inputs in batches), max_batches=RECALIBRATED_ON
        )
    return model


def _random(model: nn.Module, layers: Mapping[str, LayerCall], level: float) -> nn.Module:
    """A copy in which these layers are random."""
    model = copy.deepcopy(model)
    for shares in (True, False):
        names = {name for name, layer in layers.items() if layer.shares == shares}
        if names:
            make_stochastic_(
                model,
                posterior=partial(Additive, log_alpha=level),
                prior=Normal(learn=True),
                sampler=draw_weights if shares else "default",
                where=lambda name, _, names=names: name in names,
            )
    return model


def _scaled(model: nn.Module, factor: float) -> nn.Module:
    """A copy with noise of so many times the standard deviation."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Additive):
                module.log_variance.add_(2 * math.log(factor))
    return model


def _choices(calls: Calls, call: Call) -> dict[int, int]:
    """How many of the last layers may be random: one, the most that may be, and half way.

    With the samples that a prediction can afford then.
    """
    samples = {
        count: calls.affordable(count, call.num_samples, call.max_cost)
        for count in range(1, len(calls.layers) + 1)
    }
    # The last layer may be random at any cost: there is nothing cheaper.
    samples[1] = samples[1] or min(call.num_samples, FEWEST_SAMPLES)
    possible = [count for count, number in samples.items() if number]
    chosen = {1, possible[len(possible) // 2], possible[-1]}
    return {count: samples[count] for count in sorted(chosen)}


def _layers(calls: Calls, count: int) -> str:
    names = list(calls.last(count))
    return f"layer {names[0]}" if count == 1 else f"layers {names[0]} to {names[-1]}"
