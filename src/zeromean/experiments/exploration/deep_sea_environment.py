"""The environment of `deep_sea`, apart because it needs gymnasium to be imported."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

LEFT, RIGHT = 0, 1


class DeepSea(gym.Env):
    """A square of water; the observation is (row, column), each between 0 and 2.

    Args:
        depth: Rows, and columns, of the square.
    """

    def __init__(self, depth: int):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}.")
        self.depth = depth
        self.observation_space = gym.spaces.Box(0, 2, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._row = self._column = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._row = self._column = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._row += 1
        self._column = max(0, self._column + (1 if action == RIGHT else -1))
        reward = -0.01 / self.depth if action == RIGHT else 0.0
        at_the_bottom = self._row == self.depth
        if at_the_bottom and self._column == self.depth:
            reward += 1.0
        return self._observation(), reward, at_the_bottom, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._row, self._column], dtype=np.float32) * 2 / self.depth
