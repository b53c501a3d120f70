"""Policy gradients in gymnasium's environments: several seeds at once, noise held for an episode.

All seeds of a method train together: their parameters are stacked, and a round is one training
episode and some evaluation episodes of every seed, each in an environment and with weights of its
own. Whatever is random is a function of the seed and the number of the episode alone, so that a
seed's curve depends neither on interruptions nor, but for rounding, on its company.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean.experiments.exploration.environments import (
    Environments,
    Task,
    make_environment,
    make_environments,
)
from zeromean.training.checkpoint import DamagedError, load_tensors, save_tensors

# Standard deviations with which noisy networks start: Fortunato et al. (2017), section 3.2. The
# factorized noise there has variance 2/π in place of 1.
_SIGMA = 0.017
_SIGMA_FACTORIZED = 0.5 * math.sqrt(2 / math.pi)


def _noisy(width: int, sigma: float, noise: Any) -> nn.Module:
    posterior = partial(zm.Additive, log_variance=2 * math.log(sigma), noise=noise)
    return zm.Linear(width, width, posterior=posterior, prior=None, sampler=zm.weight)


# How the second hidden layer of a policy is made, from its width.
METHODS: dict[str, Callable[[int], nn.Module]] = {
    "deterministic": lambda width: nn.Linear(width, width),
    "parameter_noise": lambda width: _noisy(width, _SIGMA, zm.normal),
    "factorized_noise": lambda width: _noisy(
        width, _SIGMA_FACTORIZED / math.sqrt(width), zm.factorized
    ),
    "variance": lambda width: zm.Linear(width, width, sampler=zm.weight),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a policy is trained."""

    episodes: int
    width: int = 256
    lr: float = 1e-3
    noise_lr: float = 1e-2
    value_lr: float = 1e-3
    value_steps: int = 5
    value_unit: float | None = None  # By default what a reward of 1 for ever is worth.
    discount: float = 0.99
    sharpness: float = 1.0
    evaluations: int = 1


class Episodes(NamedTuple):
    """One training episode of every seed, padded to the longest."""

    observations: Tensor  # (seeds, steps, features)
    actions: Tensor  # (seeds, steps)
    rewards: Tensor  # (seeds, steps)
    running: Tensor  # (seeds, steps), False behind the end
    last_observations: Tensor  # (seeds, features)
    cut_off: Tensor  # (seeds,), whether the time limit ended it


def train(
    task: Task,
    method: str,
    seeds: Sequence[int],
    settings: Settings,
    *,
    checkpoint: Path | None = None,
    every: int = 50,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, list[list[float]]]:
    """Train a policy for every seed; the scores, `[seed][episode]`, in training and evaluation.

    After each episode the policy is updated once and evaluated, without noise on the weights where
    they have means and with fresh noise where they have none. Actions are drawn in both.

    Args:
        checkpoint: File to go on from, and to save to `every` so many episodes.
    """
    if method not in METHODS:
        raise ValueError(f"there is no policy {method!r}; choose from {', '.join(METHODS)}.")
    if len(seeds) == 0 or settings.episodes < 1:
        raise ValueError(
            f"a training needs a seed and an episode at least, got {len(seeds)} and "
            f"{settings.episodes}."
        )
    environments = make_environments(task, (len(seeds), 1 + settings.evaluations))
    learner = Learner(make_environment(task), method, seeds, settings)
    scores: list[list[list[float]]] = []
    if checkpoint is not None and checkpoint.exists():
        scores = learner.restore(checkpoint)
    for episode in range(len(scores), settings.episodes + 1):
        noise = learner.draw_noise(episode)
        episodes, totals = _play(task, learner, environments, seeds, noise, episode)
        scores.append(totals.tolist())
        if episode == settings.episodes:
            break  # The last round only evaluates.
        learner.update(episodes, noise)
        if checkpoint is not None and len(scores) % every == 0:
            learner.save(checkpoint, scores)
            recent = np.mean(scores[-every:], axis=0)[:, 1:].mean()
            say(f"{method}, episode {len(scores)} of {settings.episodes}: {recent:.1f}")
    by_seed = np.array(scores).transpose(1, 0, 2)  # (seeds, rounds, environments)
    return {
        "training": by_seed[:, :-1, 0].tolist(),
        # What round k + 1 evaluates is the policy after k updates.
        "evaluation": by_seed[:, 1:, 1:].mean(-1).tolist(),
    }


class Learner:
    """The stacked policies and baselines of all seeds."""

    def __init__(self, environment: Any, method: str, seeds: Sequence[int], settings: Settings):
        (features,) = environment.observation_space.shape
        actions = int(environment.action_space.n)
        self.settings = settings
        self.seeds = seeds
        self.value_unit = settings.value_unit or 1 / (1 - settings.discount)
        with torch.random.fork_rng(devices=[]):
            policies, baselines = [], []
            for seed in seeds:
                torch.manual_seed(seed)
                policies.append(_policy(features, actions, settings.width, METHODS[method]))
                baselines.append(_baseline(features))
        self.policy, self.baseline = policies[0], baselines[0]
        self.parameters = _stacked(policies)
        self.baseline_parameters = _stacked(baselines)
        self.has_noise = isinstance(self.policy.get_submodule("second"), zm.StochasticLayer)
        groups = zm.parameter_groups(self.policy, lr=settings.lr, log_alpha_lr=settings.noise_lr)
        names = {parameter: name for name, parameter in self.policy.named_parameters()}
        for group in groups:
            group["params"] = [self.parameters[names[p]] for p in group["params"]]
        self.optimizer = torch.optim.Adam(groups)
        self.baseline_optimizer = torch.optim.Adam(
            self.baseline_parameters.values(), lr=settings.value_lr
        )
        # Running means over episodes, by seed.
        self.advantage_scale = torch.zeros(len(seeds))
        self.length = torch.zeros(len(seeds))

    def draw_noise(self, episode: int) -> dict[str, Tensor]:
        """Noise for each seed and environment; none in evaluations of weights that have means."""
        if not self.has_noise:
            return {}
        posterior = self.policy.get_submodule("second").weight
        rows = []
        with torch.random.fork_rng(devices=[]):
            for seed in self.seeds:
                torch.manual_seed(_key(seed, episode))
                training = posterior.draw_noise()
                rest = [
                    torch.zeros_like(training) if posterior.has_mean else posterior.draw_noise()
                    for _ in range(self.settings.evaluations)
                ]
                rows.append(torch.stack([training, *rest]))
        return {"second.weight": torch.stack(rows)}

    @torch.no_grad()
    def drawn_policy(self, noise: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """The scores of actions by plain networks, `(seeds, environments, actions)`.

        The weights are drawn once for all steps: the same network as under `zm.held_noise`.
        """
        p = {name: value.detach() for name, value in self.parameters.items()}
        if self.has_noise:
            posterior = self.policy.get_submodule("second").weight
            own = {n.removeprefix("second.weight."): v for n, v in p.items() if ".weight." in n}
            draw = partial(torch.func.functional_call, posterior)
            second = torch.func.vmap(draw)(own, noise["second.weight"])
        else:
            second = None

        def scores(observations: Tensor) -> Tensor:
            hidden = _affine(observations, p["first.weight"], p["first.bias"]).relu_()
            if second is None:
                hidden = _affine(hidden, p["second.weight"], p["second.bias"])
            else:
                # Ten times as fast as weight @ column.
                product = (hidden.unsqueeze(-2) @ second.mT).squeeze(-2)
                hidden = product + p["second.bias"].unsqueeze(1)
            return _affine(hidden.relu_(), p["last.weight"], p["last.bias"])

        return scores

    def update(self, episodes: Episodes, noise: dict[str, Tensor]) -> None:
        """One step of policy gradient for every seed, and some of its baseline."""
        count = episodes.running.sum(1)
        returns, advantages = self._returns(episodes)
        spread = (advantages.square().sum(1) / count).sqrt()
        # Scores differ in scale and episodes in length, from task to task and as policies improve.
        # Divided by its own length, an episode would not give the gradient of the return.
        self.advantage_scale = _running_mean(self.advantage_scale, spread)
        self.length = _running_mean(self.length, count)
        weights = advantages / (self.advantage_scale * self.length).clamp_min(1e-6).unsqueeze(1)
        training = {name: values[:, 0] for name, values in noise.items()}
        losses = torch.func.vmap(self._loss)(
            self.parameters, training, episodes.observations, episodes.actions, weights
        )
        self.optimizer.zero_grad()
        losses.sum().backward()
        self.optimizer.step()
        for _ in range(self.settings.value_steps):
            error = (self._values(episodes.observations) - returns) * episodes.running
            self.baseline_optimizer.zero_grad()
            ((error / self.value_unit).square().sum(1) / count).sum().backward()
            self.baseline_optimizer.step()

    def _loss(
        self,
        parameters: dict[str, Tensor],
        noise: dict[str, Tensor],
        observations: Tensor,
        actions: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Of one seed: its gradient is the policy gradient, with the noise of the episode."""
        with zm.held_noise(self.policy, noise):
            scores = torch.func.functional_call(self.policy, parameters, observations)
        log_proba = (self.settings.sharpness * scores).log_softmax(-1)
        return -(log_proba.gather(-1, actions.unsqueeze(-1)).squeeze(-1) * weights).sum()

    @torch.no_grad()
    def _returns(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """Discounted rewards to go, and how far they are above the baseline."""
        to_go = self._values(episodes.last_observations.unsqueeze(1)).squeeze(1) * episodes.cut_off
        returns = torch.empty_like(episodes.rewards)
        for step in reversed(range(episodes.rewards.shape[1])):
            running = episodes.running[:, step]
            now = episodes.rewards[:, step] + self.settings.discount * to_go
            to_go = torch.where(running, now, to_go)
            returns[:, step] = to_go
        advantages = (returns - self._values(episodes.observations)) * episodes.running
        return returns, advantages

    def _values(self, observations: Tensor) -> Tensor:
        call = partial(torch.func.functional_call, self.baseline)
        values = torch.func.vmap(call)(self.baseline_parameters, observations).squeeze(-1)
        return self.value_unit * values

    def save(self, path: Path, scores: list) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "scores": scores,
            "parameters": {n: p.detach() for n, p in self.parameters.items()},
            "baseline": {n: p.detach() for n, p in self.baseline_parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "baseline_optimizer": self.baseline_optimizer.state_dict(),
            "advantage_scale": self.advantage_scale,
            "length": self.length,
        }
        save_tensors(path, state)

    @torch.no_grad()
    def restore(self, path: Path) -> list:
        try:
            state = load_tensors(path)
        except DamagedError as error:
            raise ValueError(f"{error} Remove it.") from error
        for name, value in state["parameters"].items():
            self.parameters[name].copy_(value)
        for name, value in state["baseline"].items():
            self.baseline_parameters[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.baseline_optimizer.load_state_dict(state["baseline_optimizer"])
        self.advantage_scale, self.length = state["advantage_scale"], state["length"]
        return state["scores"]


def _play(
    task: Task,
    learner: Learner,
    environments: Environments,
    seeds: Sequence[int],
    noise: dict[str, Tensor],
    episode: int,
) -> tuple[Episodes, np.ndarray]:
    """An episode in every environment: the first of a seed trains, the others evaluate."""
    shape = len(seeds), 1 + learner.settings.evaluations
    policy = learner.drawn_policy(noise)
    generators = [np.random.default_rng([seed, episode]) for seed in seeds]
    uniform = np.stack([generator.random((task.time_limit, shape[1])) for generator in generators])
    environments.reset(np.stack([g.integers(2**31, size=shape[1]) for g in generators]))
    running = np.ones(shape, dtype=bool)
    cut_off = np.zeros(shape, dtype=bool)
    totals = np.zeros(shape)
    steps: list[tuple[np.ndarray, ...]] = []
    while running.any():
        inputs = environments.observed
        scores = learner.settings.sharpness * policy(torch.from_numpy(inputs))
        actions = _sampled(scores, uniform[:, len(steps)])
        rewards, ended, timed_out = environments.step(actions, running)
        totals += rewards
        steps.append((inputs[:, 0], actions[:, 0], rewards[:, 0], running[:, 0]))
        cut_off |= timed_out
        running = running & ~ended & ~timed_out
    inputs, actions, rewards, was_running = (
        torch.from_numpy(np.stack(column, axis=1)) for column in zip(*steps, strict=True)
    )
    longest = int(was_running.sum(1).max())  # Evaluations may have gone on for longer.
    episodes = Episodes(
        inputs[:, :longest],
        actions[:, :longest],
        rewards[:, :longest],
        was_running[:, :longest],
        torch.from_numpy(environments.observed[:, 0]),
        torch.from_numpy(cut_off[:, 0]),
    )
    return episodes, totals


def _sampled(scores: Tensor, uniform: np.ndarray) -> np.ndarray:
    """One action for each row of scores, by the inverse of its distribution function."""
    cumulative = scores.double().softmax(-1).cumsum(-1).numpy()
    return (cumulative[..., :-1] < uniform[..., None]).sum(-1)


def _policy(
    features: int, actions: int, width: int, second: Callable[[int], nn.Module]
) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(features, width),
            activation1=nn.ReLU(),
            second=second(width),
            activation2=nn.ReLU(),
            last=nn.Linear(width, actions),
        )
    )


def _baseline(features: int) -> nn.Module:
    last = nn.Linear(64, 1)
    # A baseline that starts at random would be what the first updates follow.
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(features, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)


def _stacked(modules: list[nn.Module]) -> dict[str, Tensor]:
    parameters, _ = torch.func.stack_module_state(modules)
    return {name: value.detach().requires_grad_() for name, value in parameters.items()}


def _affine(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer of every seed: `(seeds, objects, in)` to `(seeds, objects, out)`."""
    return torch.baddbmm(bias.unsqueeze(1), inputs, weight.mT)


def _running_mean(mean: Tensor, value: Tensor) -> Tensor:
    return torch.where(mean == 0, value, 0.9 * mean + 0.1 * value)


def _key(seed: int, episode: int) -> int:
    return int(np.random.SeedSequence([seed, episode]).generate_state(1)[0])
