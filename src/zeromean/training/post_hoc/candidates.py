"""The candidates: one training on, and what can be read off the networks before and after it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromean.conversion.batchnorm import batchnorms, recalibrate_batchnorm_
from zeromean.conversion.make_stochastic import make_stochastic_
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.priors import Normal
from zeromean.prediction.ensemble import Ensemble
from zeromean.samplers.weights import weight as draw_weights
from zeromean.training.config import TrainingConfig
from zeromean.training.data_sources import Data, evaluation_batches
from zeromean.training.devices import Accelerator, device_of
from zeromean.training.mini_batches import split_batch
from zeromean.training.post_hoc.calibrated import WithVariance
from zeromean.training.post_hoc.contest import Contest, Entry
from zeromean.training.post_hoc.dropout import without_dropout_
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
# Batches of the training set from which BatchNorm's statistics are taken anew.
RECALIBRATED_ON = 20
# Names of what is made of the network that came and of the one trained on.
TRAINED = "trained on"
AVERAGED = "weights averaged with those trained on"
BOTH = "two networks, before and after training on"


@dataclass(frozen=True)
class Call:
    """What `add_uncertainty` was asked for.

    Attributes:
        has_variance: Whether the model returns log-variances already.
        loss: What it is trained on with: a likelihood, or a function of outputs and targets.
    """

    train: Data
    task: Task
    has_variance: bool
    loss: Any
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
    """Make and judge all candidates for a trained network, which is left as it is.

    All passes go into one training, since every other use of them was worse: a cycle of the rate
    that is cut in two, or fewer passes because several ways are tried.
    """
    contest, dressed = _begun(model, call, chooses, seed)
    tuned = _tuned(model, call, call.loss, "plain")
    between = dressed(_between(model, tuned, call))
    network, tuned = dressed(model), dressed(tuned)
    passes = call.config.epochs
    given = replace(contest.best, model=without_dropout_(copy.deepcopy(network)))
    contest.trained = contest.enter(TRAINED, tuned, None, cost=1.0, passes=passes)
    averaged = contest.enter(AVERAGED, between, None, cost=1.0, passes=passes)
    if call.max_cost >= 2:
        both = Ensemble([network, tuned])
        contest.enter(BOTH, both, None, cost=2.0, passes=passes)
    harmless = [each for each in (given, contest.trained, averaged) if each.harmless]
    _enter_random(contest, min(harmless, key=lambda each: each.row.nll), network, call)
    return contest


def _begun(
    model: nn.Module, call: Call, chooses: Examples, seed: int
) -> tuple[Contest, Callable[[nn.Module], nn.Module]]:
    """The network as it came, with a temperature, and what gives such a network log-variances.

    They are by input where that is better than one for all.
    """
    task = call.task
    if not isinstance(task, Numbers) or call.has_variance:
        return Contest(task, chooses, model, seed=seed), lambda network: network

    def with_one(network: nn.Module) -> nn.Module:
        residuals = samples_of(network, chooses.inputs, None, seed)[0] - chooses.targets
        noise = residuals.square().mean(0).clamp_min(1e-30).log()
        return WithVariance(copy.deepcopy(network), task.num_outputs, noise)

    def with_head(network: nn.Module, *, by_input: bool) -> nn.Module | None:
        head = _head(without_dropout_(copy.deepcopy(network)), chooses, call)
        return None if head is None else variance_head(network, head, by_input=by_input)

    contest = Contest(task, chooses, with_one(model), seed=seed)
    found = with_head(model, by_input=True)
    if found is None:
        return contest, with_one
    nll = contest.enter("noise by input", found, None, cost=1.0, passes=0).row.nll
    better = nll < contest.first.row.nll
    return contest, lambda network: with_head(network, by_input=better) or with_one(network)


def _enter_random(contest: Contest, best: Entry, network: nn.Module, call: Call) -> None:
    """Random layers in the best network so far; where asked for, also from the start of training.

    Args:
        network: The one that came.
    """
    calls = calls_of(best.model, contest.examples.first(2).inputs)
    if not calls.layers:
        return
    _enter_laplace(contest, best, calls, call)
    noise = _enter_noise(contest, best, calls, call)
    for weight in call.kl_weights:
        start = _random(network, calls.last(noise.count), noise.level)
        model = _tuned(start, call, call.task.likelihood, f"kl-{weight:g}", weight)
        name = f"{_layers(calls, noise.count)}: trained on with KL weight {weight:g}"
        cost = calls.cost(noise.count, noise.num_samples)
        contest.enter(name, model, noise.num_samples, cost=cost, passes=call.config.epochs)


def _enter_laplace(contest: Contest, best: Entry, calls: Calls, call: Call) -> None:
    head = _head(best.model, contest.examples, call)
    if head is None:
        return
    num_samples = _choices(calls, call)[1]
    cost = calls.full_cost(num_samples)
    # Of many weights a covariance is too large, or its draws cost too much; then variances alone.
    full = None if cost <= call.max_cost else False
    laplace = Laplace(best.model, head, call.task, full=full)
    if not laplace.full:
        cost = calls.cost(1, num_samples)
    passes = best.row.passes
    for scale in PRIOR_SCALES:
        name = f"layer {head.name}: Laplace, prior of {scale:g} times its weights"
        name = _of(name, best)
        contest.enter(name, laplace.candidate(scale), num_samples, cost=cost, passes=passes)


@dataclass(frozen=True, order=True)
class Noise:
    """How good noise on trained weights was: on how many of the last layers, how much, samples."""

    nll: float
    count: int
    level: float
    num_samples: int


def _enter_noise(contest: Contest, best: Entry, calls: Calls, call: Call) -> Noise:
    """Noise on the weights as they are, from little to much; returns the best."""
    found: list[Noise] = []
    for count, num_samples in _choices(calls, call).items():
        nll = math.inf
        cost, passes = calls.cost(count, num_samples), best.row.passes
        for level in NOISE_LEVELS:
            before = nll
            random = _random(best.model, calls.last(count), level)
            name = f"{_layers(calls, count)}: noise of {math.exp(level / 2):.0%} of weights"
            name = _of(name, best)
            nll = contest.enter(name, random, num_samples, cost=cost, passes=passes).row.nll
            found.append(Noise(nll, count, level, num_samples))
            if nll > before:
                break  # More of it will not be better.
    return min(found)


def _of(name: str, best: Entry) -> str:
    return f"{name}, {best.row.name}" if best.row.passes else name


def _head(model: nn.Module, examples: Examples, call: Call) -> Head | None:
    layers = calls_of(model, examples.first(2).inputs).layers
    if not layers:
        return None
    return head_of(model, layers[-1].name, evaluation_batches(call.train), call.num_data)


def _tuned(model: nn.Module, call: Call, loss: Any, name: str, kl_weight: float = 0.0) -> nn.Module:
    """A copy that has been trained on for all passes."""
    model = copy.deepcopy(model)
    config = call.config
    fit(
        model,
        call.train,
        replace(
            config, beta=kl_weight, kl_warmup_epochs=min(config.kl_warmup_epochs, config.epochs)
        ),
        folder=call.folder / name,
        likelihood=loss,
        accelerator=call.accelerator,
        augment=call.augment,
        progress=call.progress,
    )
    return _recalibrated_(model.eval(), call)


@torch.no_grad()
def _between(one: nn.Module, other: nn.Module, call: Call) -> nn.Module:
    """A network with the averages of their weights (SWA, Izmailov et al. 2018)."""
    model = copy.deepcopy(other)
    for parameter, its in zip(model.parameters(), one.parameters(), strict=True):
        if parameter.is_floating_point():
            parameter.lerp_(its, 0.5)
    return _recalibrated_(model, call)


def _recalibrated_(model: nn.Module, call: Call) -> nn.Module:
    """With BatchNorm's statistics under its noise, if any, and its weights.

    Running averages of the last few batches alone would be another kind of noise.
    """
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
