"""A contextual bandit: which digit is it, when all that is ever said is right or wrong?

Contexts are scikit-learn's digits, actions the ten labels, and the reward is 1 for the right one.
Thompson sampling draws a network from the posterior for every decision (`zm.held_noise` with an
example for each) and takes the action that looks best to it. All networks learn after every batch
of decisions from everything seen so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromean as zm
from zeromean.experiments.networks import small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog

TITLE = "Thompson sampling in a contextual bandit on digits"
SOURCE = "beyond the paper; Thompson sampling as in Riquelme et al. (2018)"
NEEDS: tuple[str, ...] = ("digits",)
COVERS: tuple[str, ...] = ()
NOTES = (
    "Decisions that are wrong, of {setting decisions}: {regret.greedy:.0f} by the greedy "
    "agent, {regret.ε-greedy:.0f} by ε-greedy, {regret.Thompson, mean field:.0f} by Thompson "
    "sampling with a mean-field last layer, {regret.Thompson, variance layer:.0f} with a "
    "variance layer in the middle, {regret.Thompson, Bayesian linear:.0f} with Bayesian "
    "linear regression.",
)
ACTIONS = 10


@dataclass(frozen=True, kw_only=True)
class Config:
    """Five agents on the same contexts."""

    decisions: int = 4000
    """Decisions in all; contexts come again in new orders."""
    batch_size: int = 10
    """Decisions between two updates."""
    steps: int = 20
    """Gradient steps in an update, each on 64 decisions of the past."""
    width: int = 100
    """Units in each hidden layer."""
    lr: float = 3e-3
    """Adam's learning rate."""
    epsilon: float = 0.1
    """Share of random actions of the ε-greedy agent at the start; it falls linearly to zero."""
    seed: int = 0
    """Seed of the contexts, the networks and the noise."""


QUICK = Config(decisions=1000)
SMOKE = Config(decisions=60, steps=2, width=16)


@dataclass(frozen=True)
class Agent:
    """How rewards are modelled, and how an action is chosen."""

    hidden: Callable[..., nn.Module] = nn.Linear
    last: Callable[..., nn.Module] = nn.Linear
    thompson: bool = False
    random_actions: bool = False


def _mean_field(fan_in: int, fan_out: int) -> nn.Module:
    posterior = partial(zm.Additive, log_variance=-3.0)
    return zm.Linear(fan_in, fan_out, posterior=posterior, prior=zm.Normal(scale=1.0))


AGENTS = {
    "greedy": Agent(),
    "ε-greedy": Agent(random_actions=True),
    "Thompson, mean field": Agent(last=_mean_field, thompson=True),
    "Thompson, variance layer": Agent(hidden=zm.Linear, thompson=True),
}
LINEAR = "Thompson, Bayesian linear"
CLAIMS = [
    Claim(
        f"regret_saved.{name}",
        0.0,
        ours("Thompson sampling explores"),
        0.0,
        "at least",
        f"{name}: regret saved against the greedy agent",
        "decisions",
    )
    for name in ("Thompson, mean field", "Thompson, variance layer")
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    train_images, train_labels, test_images, test_labels = small_networks.digits()
    contexts = torch.cat([train_images, test_images])
    labels = torch.cat([train_labels, test_labels])
    order = _order(len(labels), config)
    contexts, labels = contexts[order], labels[order]
    mistakes = {
        name: log.once(name, partial(_play, agent, contexts, labels, config))
        for name, agent in AGENTS.items()
    }
    mistakes[LINEAR] = log.once(LINEAR, partial(_play_linear, contexts, labels, config))
    regret = {name: float(sum(m)) for name, m in mistakes.items()}
    log.metrics(**regret)
    return {
        "regret": regret,
        "regret_saved": {name: regret["greedy"] - value for name, value in regret.items()},
        "late_accuracy": {
            name: 100 * (1 - float(np.mean(m[-len(m) // 4 :]))) for name, m in mistakes.items()
        },
        "curves": {name: np.cumsum(m)[:: max(1, len(m) // 100)] for name, m in mistakes.items()},
        "decisions": list(range(1, config.decisions + 1))[:: max(1, config.decisions // 100)],
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    traces = [
        over_seeds(name, metrics[0]["decisions"], [m["curves"][name] for m in metrics])
        for name in metrics[0]["curves"]
    ]
    return [figure("Regret: decisions that were wrong so far", "decision", "regret", traces)]


def _order(count: int, config: Config) -> Tensor:
    """Contexts in a new order for each pass over them."""
    generator = torch.Generator().manual_seed(config.seed)
    passes = -(-config.decisions // count)
    orders = [torch.randperm(count, generator=generator) for _ in range(passes)]
    return torch.cat(orders)[: config.decisions]


def _play(agent: Agent, contexts: Tensor, labels: Tensor, config: Config) -> list[int]:
    """Whether each decision was wrong."""
    width = config.width
    model = nn.Sequential(
        nn.Linear(contexts.shape[1], width),
        nn.ReLU(),
        agent.hidden(width, width),
        nn.ReLU(),
        agent.last(width, ACTIONS),
    )
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=config.lr))
    chosen = torch.empty(len(labels), dtype=torch.long)
    for start in range(0, len(labels), config.batch_size):
        batch = slice(start, min(start + config.batch_size, len(labels)))
        chosen[batch] = _decide(agent, model, contexts[batch], start / len(labels), config)
        seen = batch.stop
        rewards = (chosen[:seen] == labels[:seen]).float()
        for _ in range(config.steps):
            again = torch.randint(seen, (64,))
            scores = model(contexts[again]).gather(1, chosen[again].unsqueeze(1)).squeeze(1)
            nll = F.binary_cross_entropy_with_logits(scores, rewards[again])
            loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=seen)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return (chosen != labels).int().tolist()


@torch.no_grad()
def _decide(
    agent: Agent, model: nn.Module, contexts: Tensor, progress: float, config: Config
) -> Tensor:
    if agent.thompson:
        with zm.held_noise(model, num_objects=len(contexts)):
            return model(contexts).argmax(1)
    actions = model(contexts).argmax(1)
    if agent.random_actions:
        at_random = torch.rand(len(actions)) < config.epsilon * (1 - progress)
        actions = torch.where(at_random, torch.randint(ACTIONS, actions.shape), actions)
    return actions


def _play_linear(contexts: Tensor, labels: Tensor, config: Config) -> list[int]:
    """The classical agent: a Bayesian linear regression of the reward of each action."""
    rows = torch.cat([contexts, torch.ones(len(contexts), 1)], 1).double()
    size = rows.shape[1]
    precision = torch.eye(size).double().repeat(ACTIONS, 1, 1)
    target = torch.zeros(ACTIONS, size).double()
    noise = 0.25  # The largest variance of a reward of 0 or 1.
    wrong = []
    for start in range(0, len(labels), config.batch_size):
        batch = slice(start, min(start + config.batch_size, len(labels)))
        factor = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
        draws = torch.randn(batch.stop - start, ACTIONS, size, dtype=torch.float64)
        deviation = torch.linalg.solve_triangular(
            factor.mT, draws.movedim(0, -1), upper=True
        ).movedim(-1, 0)
        scores = torch.einsum("nai,ni->na", mean + noise**0.5 * deviation, rows[batch])
        actions = scores.argmax(1)
        for row, action, label in zip(rows[batch], actions, labels[batch], strict=True):
            precision[action] += torch.outer(row, row)
            target[action] += row * (action == label)
        wrong += (actions != labels[batch]).int().tolist()
    return wrong
