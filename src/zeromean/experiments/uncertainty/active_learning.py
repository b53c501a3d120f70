"""Active learning on MNIST: how many labels a network needs when it may choose them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean import uncertainty
from zeromean.experiments.networks import evaluation, shared_networks, small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import MOLCHANOV, ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.uncertainty.acquisition import Acquire

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Active learning on MNIST: BALD, BatchBALD and random labels"
SOURCE = "Molchanov, lecture: active learning; Kirsch et al. (2019), BatchBALD"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS: tuple[str, ...] = ()
GOAL = 95.0
NOTES = (
    "Labels until {setting most} that a test accuracy of ninety-five per cent took; a run that "
    "never got there counts as all of them. The authors' records have medians of 200 for BatchBALD "
    "by ten and 250 for BALD by ten, from a pool of all training images; here each round chooses "
    "among {setting candidates} of them, drawn anew, with {setting num_samples} samples in place "
    "of 100. The network is theirs: two convolutions and two dense layers with dropout of one "
    "half, trained anew after every round.",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One seed is three curves: about an hour of one core."""

    initial: int = 20
    """Labels to begin with, equally many of each class."""
    count: int = 10
    """Labels that are asked for in a round."""
    most: int = 300
    """Labels at which BALD and BatchBALD end."""
    most_random: int = 600
    """The same for random labels."""
    candidates: int = 2000
    """Images that a round chooses from, drawn anew from the pool."""
    num_samples: int = 30
    """Sampled networks that are asked."""
    num_configurations: int = 2000
    """Joint labels that BatchBALD draws."""
    steps: int = 500
    """Steps of Adam after every round."""
    batch_size: int = 64
    """Images in a mini-batch, fewer while there are fewer labels."""
    lr: float = 1e-3
    """Adam's learning rate, which falls linearly to zero."""
    test_samples: int = 5
    """Samples in a prediction of the test images."""
    data: str = "mnist"
    """Data set: mnist, fashion-mnist, or digits (enlarged to 28 × 28)."""
    train_size: int = 55_000
    """Training images in the pool, the first ones."""
    test_size: int = 10_000
    """Test images, the first ones."""
    seed: int = 0
    """Seed of the first labels, the networks and the noise."""

    def __post_init__(self) -> None:
        for name in ("initial", "count", "most", "candidates", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.initial <= self.most <= self.most_random:
            raise ValueError(
                "initial, most and most_random must not fall, got "
                f"{self.initial}, {self.most} and {self.most_random}."
            )


QUICK = Config(
    most=60, most_random=100, candidates=1000, steps=200, train_size=5000, test_size=1000
)
SMOKE = Config(
    initial=10,
    count=5,
    most=15,
    most_random=15,
    candidates=50,
    num_samples=5,
    num_configurations=50,
    steps=5,
    test_samples=2,
    data="digits",
    train_size=200,
    test_size=50,
)
LABELS = {"bald": "BALD", "batch_bald": "BatchBALD", "random": "random"}
CLAIMS = [
    Claim(
        "labels.batch_bald",
        200,
        ours("the median of Kirsch et al. (2019) for BatchBALD by ten"),
        40,
        "at most",
        "labels for 95% by BatchBALD",
        "labels",
        statistic="median",
    ),
    Claim(
        "labels.bald",
        250,
        ours("the median of Kirsch et al. (2019) for BALD by ten"),
        50,
        "at most",
        "labels for 95% by BALD",
        "labels",
        statistic="median",
    ),
    Claim(
        "saved.bald",
        0.0,
        MOLCHANOV("uncertainty estimation: active learning"),
        0.0,
        "at least",
        "labels for 95% that BALD saves next to random ones",
        "labels",
        statistic="median",
    ),
    Claim(
        "saved.batch_bald",
        100.0,
        ours("random must be far behind"),
        0.0,
        "at least",
        "labels for 95% that BatchBALD saves next to random ones",
        "labels",
        statistic="median",
    ),
]


class SharedDropout(nn.Module):
    """Dropout whose mask, outside of training, is the same for all examples of a batch.

    A sample is then one network for all of them, as what BatchBALD asks about several examples
    together needs. nn.Dropout draws another network for each.
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        # Whole channels of images, and single units, as the authors have it.
        shape = (len(x) if self.training else 1, x.shape[1], *([1] * (x.dim() - 2)))
        kept = (torch.rand(shape, device=x.device) >= self.p).to(x.dtype)
        return x * kept / (1 - self.p)


def network() -> nn.Sequential:
    """The authors' network: `(N, 1, 28, 28)` to logits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5),
        SharedDropout(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5),
        SharedDropout(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 128),
        SharedDropout(),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def run(config: Config, log: RunLog) -> dict[str, Any]:
    pool = shared_networks.grey_images(config.data, "rest", config.train_size, log)
    test = shared_networks.grey_images(config.data, "test", config.test_size, log)
    draw = partial(uncertainty.batch_bald, num_configurations=config.num_configurations, seed=None)
    ways: dict[str, Any] = {
        "random": uncertainty.at_random,
        "bald": uncertainty.bald,
        "batch_bald": draw,
    }
    results: dict[str, Any] = {"labels": {}, "curves": {}}
    for name, acquire in ways.items():
        curve = log.once(name, partial(_curve, name, acquire, pool, test, config, log))
        for count, accuracy in curve:
            log.metrics(way=name, labels=count, accuracy=accuracy)
        reached = [count for count, accuracy in curve if accuracy >= GOAL]
        results["curves"][name] = curve
        results["labels"][name] = min(reached, default=curve[-1][0])
        results[f"reached_{name}"] = bool(reached)
    for name in ("bald", "batch_bald"):
        saved = results["labels"]["random"] - results["labels"][name]
        results.setdefault("saved", {})[name] = saved
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    runs = [record["metrics"]["curves"] for record in records]
    return [
        figure(
            "Test accuracy against labels",
            "labels",
            "accuracy, %",
            [
                over_seeds(
                    label,
                    [count for count, _ in runs[0][name]],
                    [[accuracy for _, accuracy in curves[name]] for curves in runs],
                )
                for name, label in LABELS.items()
            ],
        )
    ]


def _curve(
    name: str,
    acquire: Acquire,
    pool: ImageSet,
    test: ImageSet,
    config: Config,
    log: RunLog,
) -> list[tuple[int, float]]:
    """Labels and test accuracy, round by round."""
    model = network()
    at_random = name == "random"

    def sample(rest: Tensor) -> Tensor:
        if at_random:  # It does not look at them.
            return torch.full((1, len(rest), 10), 0.1)
        return evaluation.sampled_probabilities(model, pool.subset(rest), config.num_samples)

    rounds = uncertainty.active_learning(
        len(pool),
        sample,
        initial=_first(pool.labels, config),
        count=config.count,
        acquire=acquire,
        candidates=config.candidates,
    )
    curve = []
    for labelled in rounds:
        model = _trained(pool.subset(labelled), config)
        accuracy = evaluation.accuracy(model, test, config.test_samples, seed=0)
        curve.append((len(labelled), accuracy))
        log.say(f"{name}: {len(labelled)} labels, {accuracy:.2f}%")
        if len(labelled) >= (config.most_random if at_random else config.most):
            break
    return curve


def _first(labels: Tensor, config: Config) -> Tensor:
    """Equally many of each class, the same for all ways to go on."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(config.seed))
    classes = torch.arange(config.initial) % 10
    rank = F.one_hot(labels[order], 10).cumsum(0).gather(1, labels[order, None])[:, 0]
    wanted = classes.bincount(minlength=10)[labels[order]]
    return order[rank <= wanted]


def _trained(data: ImageSet, config: Config) -> nn.Module:
    model = network()
    small_networks.train(
        model,
        data.images,
        data.labels,
        steps=config.steps,
        batch_size=config.batch_size,
        lr=config.lr,
    )
    return model
