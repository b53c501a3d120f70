"""Prior scales that are learned, against one that is chosen on held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean import uncertainty
from zeromean.experiments.networks import shared_networks, small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import bars
from zeromean.experiments.runs.log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Empirical Bayes: learned prior scales against a chosen one"
SOURCE = "Molchanov, lecture: empirical Bayes for Bayesian neural networks"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS: tuple[str, ...] = ()
LABELS = {
    "chosen": "chosen on held-out data",
    "layer": "one scale a layer",
    "neuron": "one a neuron",
    "weight": "one a weight",
    "hyperprior": "one a weight, hyperprior",
}
NOTES = (
    "The linear models have {setting features} weights, all of which matter, {setting rows} rows "
    "and a noise of variance 1; posterior and scales are computed in turn, each in closed form. "
    "Their chosen scale has the smallest five-fold cross-validated negative log-likelihood.",
    "The network has one hidden layer of {setting hidden} units and {setting train_size} images; "
    "its chosen scale is the best on the last 5,000 training images. The KL term rises over the "
    "first half of every training.",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Linear models in closed form, and one network for each prior."""

    problems: int = 50
    """Linear models."""
    rows: int = 60
    """Their examples."""
    features: int = 40
    """Their weights."""
    truth: float = 0.3
    """Standard deviation of the weights that made their data."""
    scales: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0)
    """Standard deviations of the prior to choose from."""
    shape: float = 5.0
    """Of the inverse-gamma hyperprior of a variance."""
    mode: float = 0.1
    """Its mode, a variance."""
    hidden: int = 100
    """Hidden units of the network."""
    train_size: int = 5000
    """Images to train it on."""
    epochs: int = 60
    """Passes over them, for every prior."""
    batch_size: int = 200
    """Images in a mini-batch."""
    lr: float = 3e-3
    """Adam's learning rate of the means."""
    log_variance_lr: float = 1e-2
    """The same of log-variances."""
    num_samples: int = 50
    """Samples of a prediction."""
    evaluate: str = "test"
    """Images that are measured on at the end."""
    data: str = "mnist"
    """Data set."""
    seed: int = 0
    """Seed of the problems, the networks, the batches and the noise."""


QUICK = Config(problems=10, train_size=2000, epochs=20, num_samples=20)
SMOKE = Config(
    problems=2,
    scales=(0.1, 1.0),
    hidden=16,
    train_size=200,
    epochs=2,
    batch_size=100,
    num_samples=2,
    data="digits",
)
_BOUND = ours("at most 2% more negative log-likelihood than a scale that was searched for")
CLAIMS = [
    *(
        Claim(f"{part}.{name}.excess", 2.0, _BOUND, 0.0, "at most", f"{what}: {LABELS[name]}", "%")
        for part, what in (("linear", "linear models"), ("network", "network"))
        for name in ("layer", "hyperprior")
    ),
    Claim(
        "linear.weight.excess",
        5.0,
        ours("the lecture's warning: many scales may overfit"),
        0.0,
        "at least",
        "linear models: one scale a weight",
        "%",
    ),
    Claim(
        "linear.weight.train_gain",
        0.0,
        ours("that it overfits, and does not underfit"),
        0.0,
        "at least",
        "linear models: how much better than the chosen scale it fits the training data",
        "nat",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    return {
        "linear": log.once("linear models", partial(_linear, config)),
        "network": _networks(config, log),
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    drawn = []
    for part, title in (("linear", "Linear models"), ("network", "Network")):
        runs = [
            {label: record["metrics"][part][name] for name, label in LABELS.items()}
            for record in records
        ]
        both = {"train_nll": "training data", "nll": "test data"}
        drawn.append(bars(f"{title}: negative log-likelihood", "prior", both, runs, y_label="nat"))
    return drawn


def learned_priors(config: Config) -> dict[str, zm.Normal]:
    hyperprior = zm.InverseGamma(config.shape, config.mode * (config.shape + 1))
    return {
        "layer": zm.Normal(learn=True),
        "neuron": zm.Normal(learn=True, per="neuron"),
        "weight": zm.Normal(learn=True, per="weight"),
        "hyperprior": zm.Normal(learn=True, per="weight", hyperprior=hyperprior),
    }


def _linear(config: Config) -> dict[str, Any]:
    """Averages over the problems."""
    totals: dict[str, dict[str, float]] = {name: {"nll": 0.0, "train_nll": 0.0} for name in LABELS}
    for problem in range(config.problems):
        generator = torch.Generator().manual_seed(10_000 * config.seed + problem)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        truth = config.truth * draw(config.features, 1)
        x = draw(config.rows + 1000, config.features)
        y = x @ truth + draw(len(x), 1)
        train, test = (x[: config.rows], y[: config.rows]), (x[config.rows :], y[config.rows :])
        best = min(config.scales, key=partial(_cross_validated, *train))
        for name, prior in {"chosen": zm.Normal(best), **learned_priors(config)}.items():
            weight = linear_posterior(prior, *train)
            totals[name]["nll"] += _linear_nll(weight, *test) / config.problems
            totals[name]["train_nll"] += _linear_nll(weight, *train) / config.problems
    return _compared(totals)


def linear_posterior(prior: zm.Normal, x: Tensor, y: Tensor, steps: int = 200) -> zm.Additive:
    """The best factorized posterior of a linear model with noise of variance 1.

    Given the scales it has a closed form, and so have the scales given the posterior.
    """
    weight = zm.Additive((1, x.shape[1]), dtype=x.dtype)
    squares = x.mT @ x
    with torch.no_grad():
        weight.mean.zero_()
        weight.log_variance.zero_()
        for _ in range(steps if prior.learn else 1):
            if prior.learn:
                variance = prior.learned_variance(weight)
            else:
                variance = torch.as_tensor(prior.scale**2).to(x)
            precision = squares + (1 / variance.expand(1, x.shape[1])[0]).diag()
            weight.mean.copy_(torch.linalg.solve(precision, x.mT @ y).mT)
            weight.log_variance.copy_(-precision.diagonal().log())
    return weight


def _cross_validated(x: Tensor, y: Tensor, scale: float) -> float:
    """Negative log-likelihood of five held-out parts."""
    total = 0.0
    for part in torch.arange(len(x)).tensor_split(5):
        kept = torch.ones(len(x), dtype=torch.bool)
        kept[part] = False
        weight = linear_posterior(zm.Normal(scale), x[kept], y[kept])
        total += _linear_nll(weight, x[part], y[part]) * len(part)
    return total / len(x)


def _linear_nll(weight: zm.Additive, x: Tensor, y: Tensor) -> float:
    mean, variance = weight.mean.detach(), weight.log_variance.detach().exp()
    predicted = torch.distributions.Normal(x @ mean.mT, (1 + x.square() @ variance.mT).sqrt())
    return -predicted.log_prob(y).mean().item()


def _networks(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean import data

    train = _first(data.load(config.data, "rest", data_dir=log.data_dir), config.train_size)
    held_out = data.load(config.data, "validation", data_dir=log.data_dir)
    split = "test" if config.evaluate == "test" else "validation"
    sets = {"nll": data.load(config.data, split, data_dir=log.data_dir), "train_nll": train}
    fixed = {f"scale {scale:g}": zm.Normal(scale) for scale in config.scales}
    models = {
        name: _trained(name, prior, train, config, log)
        for name, prior in {**fixed, **learned_priors(config)}.items()
    }
    judged = {
        name: log.once(f"choose {name}", partial(_measured, models[name], held_out, config))
        for name in fixed
    }
    best = min(fixed, key=lambda name: judged[name]["nll"])
    rows: dict[str, dict[str, float]] = {}
    for name in LABELS:
        model = models[best if name == "chosen" else name]
        measured = {
            key: log.once(f"measure {name} {key}", partial(_measured, model, images, config))
            for key, images in sets.items()
        }
        rows[name] = {key: row["nll"] for key, row in measured.items()}
        rows[name]["accuracy"] = measured["nll"]["accuracy"]
        log.metrics(prior=name, **rows[name])
    return {**_compared(rows), "chosen_scale": fixed[best].scale}


def _trained(
    name: str, prior: zm.Normal, train: ImageSet, config: Config, log: RunLog
) -> nn.Module:
    from zeromean.training import TrainingConfig

    settings = TrainingConfig(
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        log_alpha_lr=config.log_variance_lr,
        kl_warmup_epochs=max(1, config.epochs // 2),
        seed=config.seed,
    )
    identity = {"experiment": "empirical_bayes", "prior": repr(prior), **asdict(settings)}
    identity |= {"data": config.data, "size": len(train), "hidden": config.hidden}
    del identity["seed"]
    build = partial(_network, train, config.hidden, prior)
    return shared_networks.train(name, identity, build, train, settings, log).model


def _network(train: ImageSet, hidden: int, prior: zm.Normal) -> nn.Module:
    from zeromean.models import mlp

    posterior = partial(zm.Additive, log_variance=-8.0)
    layer = partial(zm.Linear, bias=False, posterior=posterior, prior=prior)
    sizes = train.images[0].numel(), hidden, train.num_classes
    return nn.Sequential(nn.Flatten(), mlp(sizes, layer))


def _measured(model: nn.Module, images: ImageSet, config: Config) -> dict[str, float]:
    batches = images.images.split(1000)
    proba = torch.cat(
        [zm.predict_proba(model, batch, config.num_samples, seed=config.seed) for batch in batches]
    )
    return {
        "nll": uncertainty.negative_log_likelihood(proba, images.labels),
        "accuracy": small_networks.accuracy(proba, images.labels),
    }


def _compared(rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    """With what each has more than the chosen scale, in per cent, and what it gains in training."""
    chosen = rows["chosen"]
    return {
        name: {
            **row,
            "excess": 100 * (row["nll"] / chosen["nll"] - 1),
            "train_gain": chosen["train_nll"] - row["train_nll"],
        }
        for name, row in rows.items()
    }


def _first(images: ImageSet, size: int) -> ImageSet:
    from zeromean.data import ImageSet

    return ImageSet(images.images[:size], images.labels[:size], images.num_classes)
