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
from zeromean.training.post_hoc.layer_sets import Calls, LayerCall, calls_of
from zeromean.training.post_hoc.tasks import Numbers, Task, samples_of
from zeromean.training.trainer import fit

if TYPE_CHECKING:
    from zeromean.data.batches import Augmentation, EpochAugmentation

# Standard deviations of the prior of the last layer, in those of its weights.
PRIOR_SCALES = (0.3, 1.0, 3.0, 10.0)
# log(σ² / μ²) of the weights, tried on the trained network as it is.
NOISE_LEVELS = (-3.0, -1.5, -0.5, 0.5)
# Of the standard deviation that fine-tuning ends with.
NOISE_FACTORS = (0.5, 2.0)
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
    noise = _enter_noise(contest, base, calls, call)
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
    cost = calls.cost(1, call.num_samples)
    for scale in PRIOR_SCALES:
        name = f"{head.name}: Laplace, prior of {scale:g} times its weights"
        contest.enter(name, laplace.candidate(scale), call.num_samples, cost=cost, passes=0.0)


def _enter_noise(
    contest: Contest, base: nn.Module, calls: Calls, call: Call
) -> list[tuple[float, int, float]]:
    """Noise on trained weights: how good, how many layers, how much, the best one first."""
    found = []
    for count in _counts(calls, call):
        for level in NOISE_LEVELS:
            random = _random(base, calls.last(count), level)
            name = f"{_layers(calls, count)}: noise of {math.exp(level / 2):.0%}"
            cost = calls.cost(count, call.num_samples)
            nll = contest.enter(name, random, call.num_samples, cost=cost, passes=0.0)
            found.append((nll, count, level))
            if len(found) > 1 and found[-2][1] == count and nll > found[-2][0]:
                break  # More noise will not be better.
    return sorted(found)


def _enter_tuned(
    contest: Contest,
    base: nn.Module,
    noise: list[tuple[float, int, float]],
    calls: Calls,
    call: Call,
) -> None:
    """Fine-tune the best noise; with several weights of the KL term, the better one goes on."""
    _, count, level = noise[0]
    budget, cost = call.config.epochs, calls.cost(count, call.num_samples)
    weights = call.kl_weights[: max(1, budget - 1)]
    pilot = budget if len(weights) == 1 else max(1, budget // (2 * len(weights)))
    tried = []
    for weight in weights:
        start = _random(base, calls.last(count), level)
        tuned = _tuned(start, call, weight, pilot, f"{count}-{weight:g}")
        name = f"{_layers(calls, count)}: fine-tuned, KL weight {weight:g}"
        nll = contest.enter(name, tuned, call.num_samples, cost=cost, passes=pilot)
        tried.append((nll, weight, tuned))
    nll, weight, tuned = min(tried, key=lambda each: each[0])
    passes = budget - pilot * (len(weights) - 1)
    name = f"{_layers(calls, count)}: fine-tuned, KL weight {weight:g}"
    if passes > pilot:
        tuned = _tuned(tuned, call, weight, passes - pilot, f"{count}-{weight:g}-on")
        nll = contest.enter(name, tuned, call.num_samples, cost=cost, passes=passes)
    for factor in NOISE_FACTORS:
        louder = _scaled(tuned, factor)
        label = f"{name}, {factor:g} times its noise"
        contest.enter(label, louder, call.num_samples, cost=cost, passes=passes)


def _tuned(model: nn.Module, call: Call, weight: float, epochs: int, name: str) -> nn.Module:
    """A copy that has been trained on, with BatchNorm's statistics under its noise."""
    model = copy.deepcopy(model)
    warmup = min(call.config.kl_warmup_epochs, epochs)
    fit(
        model,
        call.train,
        replace(call.config, epochs=epochs, beta=weight, kl_warmup_epochs=warmup),
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


def _counts(calls: Calls, call: Call) -> list[int]:
    """How many of the last layers may be random: one, the most that may be, and half way."""
    most = 1
    for count in range(2, len(calls.layers) + 1):
        if calls.cost(count, call.num_samples) <= call.max_cost:
            most = count
    return sorted({1, (1 + most) // 2, most})


def _layers(calls: Calls, count: int) -> str:
    names = list(calls.last(count))
    return names[0] if count == 1 else f"{names[0]} to {names[-1]}"
