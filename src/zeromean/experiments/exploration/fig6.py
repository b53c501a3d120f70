"""Figure 6: exploration by a variance layer in the policy, on CartPole and Acrobot."""

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
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog

TITLE = "Figure 6: policies with a variance layer explore (CartPole, Acrobot)"
SOURCE = "Neklyudov et al. (2019), section 6.2 and Figure 6"
NEEDS: tuple[str, ...] = ()
COVERS = ("paper: Figure 6",)
TASKS = {
    # CartPole-v0 is CartPole-v1 with a limit of 200 steps.
    "cartpole": Task(environment="CartPole-v1", time_limit=200, scale=(1.0, 1.0, 0.1, 1.0)),
    "acrobot": Task(environment="Acrobot-v1", time_limit=500, scale=(1.0, 1.0, 1.0, 1.0, 4.0, 9.0)),
}
BEST = {"cartpole": 190.0, "acrobot": -100.0}
RIVALS = {"deterministic": "the deterministic one", "parameter_noise": "parameter noise"}
TUNING_SEED = 10**6
LAST = 50  # Episodes at the end that a final score is the mean of.
NOTES = (
    "Every method has {setting num_seeds} policies, with seeds of their own, and the "
    "intervals of the differences (variance_minus) are bootstraps over these. The mean scores "
    "of the last episodes are {cartpole.methods.variance.final} on CartPole and "
    "{acrobot.methods.variance.final} on Acrobot with a variance layer, "
    "{cartpole.methods.deterministic.final} and {acrobot.methods.deterministic.final} without "
    "noise, {cartpole.methods.parameter_noise.final} and "
    "{acrobot.methods.parameter_noise.final} with parameter noise. CartPole ends at the limit "
    "of 200, which leaves the best methods no room to differ.",
    "Checked: the gradient against a plain loop, the environments against gymnasium's, and "
    "the learning rate, which every method chose from the same ones ({setting rates}) by "
    "policies with other seeds. A variance policy is evaluated with fresh noise for each "
    "episode, as it has no means.",
)
Curves = dict[str, list[list[float]]]  # Of training and evaluation, by seed.


@dataclass(frozen=True, kw_only=True)
class Config:
    """Policy gradients with one update for each episode, all seeds of a method at once."""

    environments: tuple[str, ...] = tuple(TASKS)
    """cartpole (200 steps at most), acrobot (500)."""
    methods: tuple[str, ...] = tuple(METHODS)
    """How the second hidden layer is random: deterministic, parameter_noise, factorized_noise,
    variance."""
    episodes: int = 1000
    """Training episodes, each followed by an update and an evaluation episode."""
    num_seeds: int = 9
    """Policies of every kind, which differ by their seeds."""
    width: int = 256
    """Units in each hidden layer."""
    rates: tuple[float, ...] = (1e-3, 3e-3)
    """Adam's learning rates to choose from, for every method and environment by itself."""
    tuning_episodes: int = 300
    """Training episodes of the policies that the choice is made by."""
    tuning_seeds: int = 3
    """Their number at each rate, with seeds that are used for nothing else."""
    seed: int = 0
    """The seeds of the policies follow from it."""


QUICK = Config(episodes=100, num_seeds=3, tuning_episodes=50, tuning_seeds=2)
SMOKE = Config(episodes=4, num_seeds=2, width=16, tuning_episodes=2, tuning_seeds=1)


def _claims() -> list[Claim]:
    claims = []
    for name, best in BEST.items():
        claims += [
            Claim(
                f"{name}.best",
                best,
                ours("near what the task allows"),
                0.0,
                "at least",
                f"{name}: score of the best method in its last {LAST} episodes",
            ),
            *(
                Claim(
                    f"{name}.variance_minus.{rival}",
                    0.0,
                    PAPER("section 6.2, “tends to reach a better final result”"),
                    0.0,
                    "at least",
                    f"{name}: final score of the variance policy less that of {label}",
                    seeds_in_run="num_seeds",
                )
                for rival, label in RIVALS.items()
            ),
            Claim(
                f"{name}.variance_is_slower",
                1.0,
                PAPER("section 6.2, “progresses slowly”"),
                label=f"{name}: the variance policy needs more episodes for half of the way to "
                "where the deterministic one ends",
            ),
        ]
    return claims


CLAIMS = _claims()


def run(config: Config, log: RunLog) -> dict[str, Any]:
    for given, known in ((config.environments, TASKS), (config.methods, METHODS)):
        for name in given:
            if name not in known:
                raise ValueError(f"there is no {name!r} here; choose from {', '.join(known)}.")
    results: dict[str, Any] = {}
    for environment in config.environments:
        curves, rates = {}, {}
        for method in config.methods:
            rates[method] = _best_rate(environment, method, config, log)
            curves[method] = _train(environment, method, rates[method], config, log)
        results[environment] = {
            **_compared({method: c["evaluation"] for method, c in curves.items()}),
            "rates": rates,
            "curves": {
                method: {kind: _blocks(scores) for kind, scores in c.items()}
                for method, c in curves.items()
            },
        }
        final = {method: r["final"] for method, r in results[environment]["methods"].items()}
        log.metrics(environment=environment, **final)
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    drawn = []
    for environment, result in records[0]["metrics"].items():
        for kind in ("evaluation", "training"):
            traces = []
            for method in result["curves"]:
                curves = [
                    curve
                    for r in records
                    for curve in r["metrics"][environment]["curves"][method][kind]
                ]
                episodes = _middles(len(curves[0]), records[0]["config"]["episodes"])
                traces.append(over_seeds(method.replace("_", " "), episodes, curves))
            title = f"{environment}: score in {kind}, mean and standard error over the seeds"
            drawn.append(figure(title, "training episodes", "score", traces))
    return drawn


def _best_rate(environment: str, method: str, config: Config, log: RunLog) -> float:
    """The rate whose policies score most over a short training."""
    if len(config.rates) == 1:
        return config.rates[0]
    scores = {}
    for rate in config.rates:
        settings = Settings(episodes=config.tuning_episodes, width=config.width, lr=rate)
        seeds = range(TUNING_SEED, TUNING_SEED + config.tuning_seeds)
        stage = f"{environment} {method} tuning {rate:g}"
        curves = _curves(stage, environment, method, seeds, settings, log)
        scores[rate] = np.mean(curves["evaluation"])
    return max(scores, key=scores.__getitem__)


def _train(environment: str, method: str, rate: float, config: Config, log: RunLog) -> Curves:
    settings = Settings(episodes=config.episodes, width=config.width, lr=rate)
    seeds = range(config.seed * config.num_seeds, (config.seed + 1) * config.num_seeds)
    return _curves(f"{environment} {method}", environment, method, seeds, settings, log)


def _curves(
    stage: str, environment: str, method: str, seeds: range, settings: Settings, log: RunLog
) -> Curves:
    compute = partial(
        policy_gradient.train,
        TASKS[environment],
        method,
        seeds,
        settings,
        checkpoint=log.folder / "checkpoints" / f"{stage}.pt",
        say=log.say,
    )
    return log.once(stage, compute)


def _compared(scores: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Every method, and what is claimed of the variance policy compared with them."""
    final = {method: np.array(s)[:, -LAST:].mean(1) for method, s in scores.items()}
    # The way from where policies start to where the deterministic one ends.
    start = np.mean([np.mean(_blocks(s), axis=0)[0] for s in scores.values()])
    end = final["deterministic" if "deterministic" in scores else next(iter(scores))].mean()
    half_way = {method: _reached(s, (start + end) / 2) for method, s in scores.items()}
    result: dict[str, Any] = {
        "methods": {
            method: {
                "final": values.mean().item(),
                "final_by_seed": values.tolist(),
                "half_way": half_way[method],
            }
            for method, values in final.items()
        },
        "best": max(values.mean().item() for values in final.values()),
    }
    if {"variance", *RIVALS} <= scores.keys():
        intervals = {rival: _bootstrap(final["variance"], final[rival]) for rival in RIVALS}
        episodes = {method: half_way[method] or np.inf for method in ("variance", *RIVALS)}
        result |= {
            "variance_minus": intervals,
            "variance_ends_better": float(all(i["low"] > 0 for i in intervals.values())),
            "variance_is_slower": float(all(episodes["variance"] > episodes[r] for r in RIVALS)),
        }
    return result


def _reached(scores: list[list[float]], target: float) -> int | None:
    """Episodes until a block of the mean score has reached the target."""
    blocks = np.mean(_blocks(scores), axis=0)
    if not (blocks >= target).any():
        return None
    return int(_middles(len(blocks), len(scores[0]))[int(np.argmax(blocks >= target))])


def _bootstrap(a: np.ndarray, b: np.ndarray, draws: int = 10_000) -> dict[str, float]:
    """95% interval of the difference of two means, by resampling both."""
    generator = np.random.default_rng(0)
    means = [generator.choice(values, size=(draws, len(values))).mean(1) for values in (a, b)]
    low, high = np.quantile(means[0] - means[1], [0.025, 0.975]).tolist()
    return {"low": low, "high": high}


def _blocks(scores: list[list[float]], count: int = 100) -> list[list[float]]:
    """Curves in at most `count` points, each the mean of as many episodes."""
    values = np.array(scores)
    size = max(1, values.shape[1] // count)
    whole = values[:, : values.shape[1] // size * size]
    return whole.reshape(len(values), -1, size).mean(2).tolist()


def _middles(num_blocks: int, episodes: int) -> list[float]:
    size = episodes // num_blocks
    return [size * (k + 0.5) + 0.5 for k in range(num_blocks)]
