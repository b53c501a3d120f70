"""Policy gradients in gymnasium's environments: several seeds at once, noise held for an episode.

All seeds of a method train together: their parameters are stacked, and a round is one training
episode and some evaluation episodes of every seed, each in an environment and with weights of its
own. Whatever is random is a function of the seed and the number of the episode alone, so that a
seed's curve depends neither on interruptions nor, but for rounding, on its company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zeromean.experiments.exploration.environments import (
    Environments,
    Task,
    make_environment,
    make_environments,
)
from zeromean.experiments.exploration.learner import Episodes, Learner, Settings
from zeromean.experiments.exploration.policies import METHODS


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
