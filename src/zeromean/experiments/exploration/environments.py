"""gymnasium's environments, a table of them stepped at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zeromean.extras import how_to_install


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment and how its observations are scaled: (observation − shift) / scale."""

    environment: str
    time_limit: int
    scale: tuple[float, ...]
    shift: tuple[float, ...] = ()


class Step(NamedTuple):
    """What a step brought, for every environment of the table; zeros where none was made."""

    rewards: np.ndarray
    ended: np.ndarray
    timed_out: np.ndarray


class Environments:
    """A table of environments that begin an episode together, each stepped by its own code.

    Attributes:
        observed: The last observation of each, scaled; a copy for the caller to keep.
    """

    def __init__(self, task: Task, shape: tuple[int, int]):
        self._rows = [[make_environment(task) for _ in range(shape[1])] for _ in range(shape[0])]
        self._scale = np.array(task.scale, dtype=np.float32)
        self._shift = np.array(task.shift or np.zeros_like(self._scale), dtype=np.float32)
        self._raw = np.zeros((*shape, len(task.scale)), dtype=np.float32)

    @property
    def observed(self) -> np.ndarray:
        return (self._raw - self._shift) / self._scale

    def reset(self, seeds: np.ndarray) -> None:
        for at, seed in np.ndenumerate(seeds):
            self._raw[at], _ = self._rows[at[0]][at[1]].reset(seed=int(seed))

    def step(self, actions: np.ndarray, running: np.ndarray) -> Step:
        step = _nothing(running.shape)
        for i, j in np.argwhere(running):
            observation, reward, ended, timed_out, _ = self._rows[i][j].step(int(actions[i, j]))
            self._raw[i, j], step.rewards[i, j] = observation, reward
            step.ended[i, j], step.timed_out[i, j] = ended, timed_out and not ended
        return step


class Acrobots(Environments):
    """Acrobots whose equations, gymnasium's own, are integrated for all at once.

    One step of gymnasium's takes as long as one of the whole table here.
    """

    def __init__(self, task: Task, shape: tuple[int, int]):
        super().__init__(task, shape)
        self._one = self._rows[0][0].unwrapped
        self._time_limit = task.time_limit
        self._state = np.zeros((4, *shape))
        self._steps = 0

    def reset(self, seeds: np.ndarray) -> None:
        super().reset(seeds)
        for i, j in np.ndindex(*seeds.shape):
            self._state[:, i, j] = self._rows[i][j].unwrapped.state
        self._steps = 0

    def step(self, actions: np.ndarray, running: np.ndarray) -> Step:
        self._steps += 1
        one, step = self._one, _nothing(running.shape)
        torque = np.array(one.AVAIL_TORQUE)[actions]
        angle1, angle2, speed1, speed2 = _runge_kutta(
            lambda state: np.stack(one._dsdt((*state, torque))[:4]), self._state, one.dt
        )
        state = np.stack(
            [
                _wrapped(angle1),
                _wrapped(angle2),
                speed1.clip(-one.MAX_VEL_1, one.MAX_VEL_1),
                speed2.clip(-one.MAX_VEL_2, one.MAX_VEL_2),
            ]
        )
        self._state = state = np.where(running, state, self._state)
        angles = state[:2]
        waves = (np.cos(angles[0]), np.sin(angles[0]), np.cos(angles[1]), np.sin(angles[1]))
        self._raw = np.stack([*waves, *state[2:]], axis=-1).astype(np.float32)
        up = -np.cos(angles[0]) - np.cos(angles[1] + angles[0]) > 1.0
        step.ended[:] = running & up
        step.timed_out[:] = running & ~up & (self._steps == self._time_limit)
        step.rewards[running & ~up] = -1.0
        return step


def make_environments(task: Task, shape: tuple[int, int]) -> Environments:
    kind = Acrobots if task.environment == "Acrobot-v1" else Environments
    return kind(task, shape)


def make_environment(task: Task) -> Any:
    """A gymnasium environment with a discrete set of actions."""
    try:
        import gymnasium as gym
    except ImportError:
        raise ImportError(
            how_to_install("reinforcement learning needs gymnasium", "experiments")
        ) from None
    try:
        environment = gym.make(
            task.environment, max_episode_steps=task.time_limit, disable_env_checker=True
        )
    except gym.error.Error as error:
        raise ValueError(
            f"gymnasium cannot make {task.environment!r} ({error}); see gymnasium.pprint_registry()"
            " for the environments that there are."
        ) from None
    if not isinstance(environment.action_space, gym.spaces.Discrete):
        raise ValueError(
            f"the policies here choose among a number of actions, and {task.environment} has the "
            f"action space {environment.action_space}; use one with a Discrete action space."
        )
    shape = environment.observation_space.shape
    if shape is None or len(shape) != 1:
        raise ValueError(
            f"the policies here read vectors, and {task.environment} has the observation space "
            f"{environment.observation_space}; flatten it with a wrapper."
        )
    for numbers in (task.scale, task.shift or task.scale):
        if len(numbers) != shape[0]:
            raise ValueError(
                f"the task has {len(numbers)} numbers to scale or shift observations by, and an "
                f"observation of {task.environment} has {shape[0]}."
            )
    return environment


def _nothing(shape: tuple[int, ...]) -> Step:
    return Step(np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, bool))


def _runge_kutta(slope: Any, state: np.ndarray, duration: float) -> np.ndarray:
    """One step of the classical method of fourth order."""
    first = slope(state)
    second = slope(state + duration / 2 * first)
    third = slope(state + duration / 2 * second)
    fourth = slope(state + duration * third)
    return state + duration / 6 * (first + 2 * second + 2 * third + fourth)


def _wrapped(angle: np.ndarray) -> np.ndarray:
    """The same angle between −π and π."""
    return angle - 2 * np.pi * np.round(angle / (2 * np.pi))
