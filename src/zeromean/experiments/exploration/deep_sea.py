"""Deep sea: a treasure that only a long run of the same action finds.

A diver starts at the top left of a square of water and sinks by one row with every step, one
column to the right or one to the left. Going right costs a little; the treasure is at the bottom
right, and nothing on the way says so. Actions drawn one by one find it with probability 2^−depth.
Osband et al. (2019) give every cell a code of its own; here the diver sees the coordinates, so that
a network can carry on in a direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zeromean.experiments.exploration import policy_gradient
from zeromean.experiments.exploration.environments import Task
from zeromean.experiments.exploration.learner import Settings
from zeromean.experiments.exploration.policies import METHODS
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog

TITLE = "Deep sea: noise held for an episode explores where noise on actions fails"
SOURCE = "beyond the paper; the problem is of Osband et al. (2019)"
NEEDS: tuple[str, ...] = ()
COVERS: tuple[str, ...] = ()
NOTES = (
    "Every method has {setting num_seeds} seeds. At the depth of 30, "
    "{depths.30.variance.discovered:.0f} per cent of the variance policies come across the "
    "treasure in training, and {depths.30.variance.solved:.0f} bring it up in the end; with "
    "noise on actions alone {depths.30.deterministic, actions at random.discovered:.0f} per "
    "cent come across it.",
    "It is not so at every depth. At 20 the variance policies bring it up in "
    "{depths.20.variance.solved:.0f} per cent, policies without noise, but as sharp, in "
    "{depths.20.deterministic.solved:.0f}; at 10 in {depths.10.variance.solved:.0f} and "
    "{depths.10.deterministic.solved:.0f}. With so few seeds these are coarse numbers.",
)
FOUND = 0.5  # An episode that scores more has brought up the treasure.
LAST = 50  # Episodes at the end that count.


@dataclass(frozen=True, kw_only=True)
class Config:
    """Policy gradients as in Figure 6, at several depths."""

    depths: tuple[int, ...] = (10, 20, 30)
    """Rows and columns of the square."""
    methods: tuple[str, ...] = tuple(METHODS)
    """How the second hidden layer is random: deterministic, parameter_noise, factorized_noise,
    variance."""
    episodes: int = 400
    """Training episodes, each followed by an update and an evaluation episode."""
    num_seeds: int = 9
    """Policies of every kind, which differ by their seeds."""
    width: int = 256
    """Units in each hidden layer."""
    lr: float = 1e-3
    """Adam's learning rate."""
    sharpness: float = 100.0
    """Factor of the scores of actions, for all methods: at 1 new policies act nearly at random, at
    100 they do what their weights say. A deterministic policy is also trained with 1."""
    seed: int = 0
    """The seeds of the policies follow from it."""


QUICK = Config(depths=(10, 20), episodes=100, num_seeds=4)
SMOKE = Config(depths=(4,), episodes=4, num_seeds=2, width=16)
UNSHARP = "deterministic, actions at random"
CLAIMS = [
    Claim(
        "deepest.variance",
        100.0,
        ours(),
        0.0,
        "at least",
        "seeds whose variance policy brings up the treasure in the end, greatest depth",
        "%",
    ),
    Claim(
        f"deepest.{UNSHARP}",
        0.0,
        ours("actions at random find it with probability 2^−depth"),
        0.0,
        "at most",
        "seeds that find it by noise on actions alone",
        "%",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    unknown = [method for method in config.methods if method not in METHODS]
    if unknown:
        raise ValueError(f"there is no policy {unknown[0]!r}; choose from {', '.join(METHODS)}.")
    if not config.depths:
        raise ValueError("depths must have one depth at least, got none.")
    variants = {method: (method, config.sharpness) for method in config.methods}
    if "deterministic" in variants:
        variants[UNSHARP] = ("deterministic", 1.0)
    depths = {}
    for depth in config.depths:
        depths[str(depth)] = {
            name: _train(depth, method, sharpness, config, log)
            for name, (method, sharpness) in variants.items()
        }
        log.metrics(depth=depth, **{name: r["solved"] for name, r in depths[str(depth)].items()})
    deepest = depths[str(max(config.depths))]
    return {
        "depths": depths,
        "deepest": {name: result["solved"] for name, result in deepest.items()},
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    depths = list(records[0]["metrics"]["depths"])
    names = list(records[0]["metrics"]["depths"][depths[0]])
    labels = {name: name.replace("_", " ") for name in names}
    runs = [record["metrics"]["depths"] for record in records]

    def by_depth(key: str) -> list[dict[str, Any]]:
        return [
            over_seeds(
                labels[name], depths, [[r[d][name][key] for d in depths] for r in runs], kind="bar"
            )
            for name in names
        ]

    curves = [
        over_seeds(
            labels[name],
            list(range(1, len(runs[0][depths[-1]][name]["found"][0]) + 1)),
            [curve for r in runs for curve in r[depths[-1]][name]["found"]],
        )
        for name in names
    ]
    return [
        figure(
            "Seeds that come across the treasure in training",
            "depth",
            "seeds, %",
            by_depth("discovered"),
        ),
        figure(
            "Seeds that bring up the treasure in the end", "depth", "seeds, %", by_depth("solved")
        ),
        figure(
            f"Evaluations that bring up the treasure, depth {depths[-1]}",
            "blocks of 10 training episodes",
            "evaluations, %",
            curves,
        ),
    ]


def _train(
    depth: int, method: str, sharpness: float, config: Config, log: RunLog
) -> dict[str, Any]:
    task = Task(
        environment=_registered(depth), time_limit=depth + 1, scale=(0.5, 0.5), shift=(1, 1)
    )
    settings = Settings(
        episodes=config.episodes,
        width=config.width,
        lr=config.lr,
        sharpness=sharpness,
        value_unit=1.0,  # The treasure, which comes once.
    )
    stage = f"depth {depth} {method} {sharpness:g}"
    seeds = range(config.seed * config.num_seeds, (config.seed + 1) * config.num_seeds)
    scores = log.once(
        stage,
        partial(
            policy_gradient.train,
            task,
            method,
            seeds,
            settings,
            checkpoint=log.folder / "checkpoints" / f"{stage}.pt",
            say=log.say,
        ),
    )
    found = np.array(scores["evaluation"]) > FOUND
    in_training = np.array(scores["training"]) > FOUND
    blocks = found[:, : max(1, found.shape[1] // 10) * 10]
    blocks = blocks.reshape(len(found), -1, min(10, blocks.shape[1]))
    return {
        "discovered": 100 * in_training.any(1).mean().item(),
        "solved": 100 * (found[:, -LAST:].mean(1) > 0.9).mean().item(),
        "first_found": [int(np.argmax(f)) + 1 if f.any() else None for f in in_training],
        "found": (100 * blocks.mean(2)).tolist(),
    }


def _registered(depth: int) -> str:
    """The name under which gymnasium makes the sea of this depth."""
    try:
        import gymnasium as gym
    except ImportError:
        return f"DeepSea{depth}-v0"  # Making it will say what is missing.
    from zeromean.experiments.exploration.deep_sea_environment import DeepSea

    name = f"DeepSea{depth}-v0"
    if name not in gym.registry:
        gym.register(name, entry_point=lambda **options: DeepSea(depth, **options))
    return name
