"""Training by moments, and by one draw of the noise a step: gradient variance, ELBO by CPU time.

The same networks from the same start, on the four toy classes, on digits and on a regression. With
moments (deterministic variational inference, Wu et al. 2019) the data term is an expectation; with
local reparameterization (LRT) it is a draw. Both are judged by the same ELBO, averaged over draws.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromean as zm
from zeromean import data
from zeromean.experiments.networks.small_networks import digits
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.moments import propagated
from zeromean.training import expected_nll

TITLE = "Deterministic variational inference by moments, compared with LRT"
SOURCE = "ours, after Wu et al. (2019)"
NEEDS: tuple[str, ...] = ("digits", "toy")
COVERS: tuple[str, ...] = ()
TASKS = ("toy", "digits", "regression")
WAYS = ("lrt", "moments")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Two hidden layers, all additive, with a normal prior."""

    steps: int = 3000
    """Steps of Adam, for both."""
    looks: int = 15
    """How often the ELBO is measured on the way."""
    hidden: int = 100
    """Units of each hidden layer."""
    batch_size: int = 100
    """Examples in a mini-batch."""
    lr: float = 3e-3
    """Learning rate at the start; it falls linearly to zero."""
    draws: int = 100
    """Draws of the noise for the ELBO, and for the variance of a gradient."""
    seed: int = 0
    """Seed of the network, the batches and the noise."""


QUICK = Config(steps=600, looks=6, draws=50)
SMOKE = Config(steps=4, looks=2, hidden=8, draws=5)
CLAIMS = [
    *(
        Claim(
            f"{task}.moments.gradient_variance",
            0.0,
            ours("nothing is drawn"),
            0.0,
            "at most",
            label=f"{task}: variance of the gradient, moments",
        )
        for task in TASKS
    ),
    *(
        Claim(
            f"{task}.gained_at_equal_time",
            0.0,
            ours("set before it was measured"),
            0.0,
            "at least",
            label=f"{task}: ELBO of moments less that of LRT at equal CPU time, nats an example",
            unit="nat",
        )
        for task in TASKS
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for task in TASKS:
        found = {
            way: log.once(f"{task} {way}", partial(_trained, config, task, way)) for way in WAYS
        }
        # At the end of the one that is done first; the clocks of both begin with the first step.
        end = min(each["seconds"][-1] for each in found.values())
        at_end = {w: float(np.interp(end, f["seconds"], f["elbo"])) for w, f in found.items()}
        metrics[task] = {**found, "gained_at_equal_time": at_end["moments"] - at_end["lrt"]}
        log.metrics(task=task, seconds=end, **at_end)
    return metrics


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    drawn = []
    for task in TASKS:
        curves = []
        for way in WAYS:
            each = [record["metrics"][task][way] for record in records]
            seconds = np.mean([one["seconds"] for one in each], axis=0).tolist()
            curves.append(over_seeds(way, seconds, [one["elbo"] for one in each]))
        drawn.append(figure(f"ELBO, {task}", "CPU seconds", "nats an example", curves))
    return drawn


def _task(name: str, config: Config) -> tuple[Tensor, Tensor, int, Any]:
    """Inputs, targets, outputs of the network, and the likelihood."""
    if name == "digits":
        inputs, labels, *_ = digits()
        return inputs, labels, 10, None
    if name == "toy":
        points = data.load("toy", "train")
        return points.images, points.labels, 4, None
    x = torch.linspace(-2, 2, 400).unsqueeze(1)
    noise = 0.2 * torch.randn(400, 1, generator=torch.Generator().manual_seed(config.seed))
    likelihood = zm.GaussianLikelihood(1, noise_variance=0.1)
    return x, (3 * x).sin() + x / 2 + noise, 1, likelihood


def _trained(config: Config, task: str, way: str) -> dict[str, Any]:
    torch.manual_seed(config.seed)
    inputs, targets, outputs, likelihood = _task(task, config)
    layer = partial(
        zm.Linear, posterior=partial(zm.Additive, log_variance=-7.0), prior=zm.Normal(scale=0.3)
    )
    sizes = (inputs.shape[1], config.hidden, config.hidden)
    hidden = [(layer(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
    model = nn.Sequential(*(part for pair in hidden for part in pair), layer(sizes[-1], outputs))
    groups = zm.parameter_groups(model, lr=config.lr)
    if likelihood is not None:
        groups.append({"params": list(likelihood.parameters()), "lr": config.lr})
    optimizer = torch.optim.Adam(groups, eps=1e-8 / len(inputs))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / config.steps)

    def loss(batch: Tensor) -> Tensor:
        x, y = inputs[batch], targets[batch]
        if way == "moments":
            nll = expected_nll(propagated(model, lambda: model(x)), y, likelihood)
        elif likelihood is None:
            nll = F.cross_entropy(model(x), y)
        else:
            nll = likelihood.nll(model(x), y)
        return zm.elbo_loss(nll, zm.kl_divergence(model), num_data=len(inputs))

    seconds, elbos, spent = [0.0], [_elbo(config, model, inputs, targets, likelihood)], 0.0
    every = max(config.steps // config.looks, 1)
    for step in range(config.steps):
        start = time.process_time()
        optimizer.zero_grad()
        loss(torch.randint(len(inputs), (config.batch_size,))).backward()
        optimizer.step()
        schedule.step()
        spent += time.process_time() - start
        if (step + 1) % every == 0:
            seconds.append(spent)
            elbos.append(_elbo(config, model, inputs, targets, likelihood))
    batch = torch.arange(min(config.batch_size, len(inputs)))
    parameters = list(model.parameters())
    gradients = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss(batch), parameters)])
            for _ in range(config.draws)
        ]
    )
    # In double precision: equal gradients have a variance of exactly zero.
    variance = float((gradients - gradients[:1]).double().var(0).sum())
    return {"seconds": seconds, "elbo": elbos, "gradient_variance": variance}


@torch.no_grad()
def _elbo(
    config: Config, model: nn.Module, inputs: Tensor, targets: Tensor, likelihood: Any
) -> float:
    """The ELBO of an example, its data term averaged over draws of the outputs."""
    nll = F.cross_entropy if likelihood is None else likelihood.nll
    samples = zm.sample_outputs(model, inputs, config.draws, seed=config.seed)
    data_term = torch.stack([nll(outputs, targets) for outputs in samples]).mean()
    return -float(zm.elbo_loss(data_term, zm.kl_divergence(model), num_data=len(inputs)))
