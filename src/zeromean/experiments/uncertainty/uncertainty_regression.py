"""One call on a regression of three sets, next to plain training for the same time.

The control has one noise variance for all inputs, fitted to the validation examples. Every set is
divided at random several times in a run. Full size takes about five minutes a seed on one core.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import bars
from zeromean.experiments.runs.log import RunLog
from zeromean.training.post_hoc.tasks import Numbers, samples_of

TITLE = "One call that adds uncertainty: regressions next to plain training for the same time"
SOURCE = "ours: what a user of the library gets from a network that is trained already"
NEEDS: tuple[str, ...] = ()
COVERS: tuple[str, ...] = ()
TIMINGS = ("*seconds", "*.cost", "*.time_share")
SETS = ("diabetes", "friedman1", "friedman3")
NETWORKS = {"control": "trained on", "call": "add_uncertainty"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The networks, the data, and what is done with them."""

    sets: tuple[str, ...] = SETS
    """Data sets: diabetes, friedman1, friedman2, friedman3."""
    splits: int = 10
    """Random divisions of each set."""
    epochs: int = 200
    """Passes over the training set of the network that is given."""
    control_epochs: int = 40
    """Passes of plain training that are the control."""
    call_epochs: int = 25
    """Passes of the call, which takes the rest of the time to look and choose."""
    width: int = 50
    """Units of each of the two hidden layers."""
    lr: float = 1e-3
    """Adam's rate at the first step."""
    more_lr: float = 3e-4
    """The same where a network is trained on."""
    batch_size: int = 32
    """Examples in a mini-batch."""
    made: int = 3000
    """Examples of a set that is made: a fifth is for training and a fifth for validation. Of the
    others three fifths and a fifth."""
    num_samples: int = 20
    """Samples in an averaged prediction."""
    seed: int = 0
    """Seed of the divisions, the initialization, the batches and the noise."""


QUICK = Config(splits=2)
SMOKE = Config(
    sets=("diabetes",), splits=1, epochs=2, control_epochs=1, call_epochs=1, num_samples=4
)


def _claims() -> list[Claim]:
    why = ours("the bound that one call must keep to be safe to use")
    than = "add_uncertainty next to plain training for the same time"
    found = []
    for name in SETS:
        found += [
            Claim(
                f"{name}.rmse_ratio", 1.0, why, 0.01, "at most", f"{name}: ratio of RMSEs, {than}"
            ),
            Claim(
                f"{name}.log_density_gain",
                0.0,
                why,
                0.0,
                "at least",
                f"{name}: log density gained, {than}",
                "nat",
            ),
            Claim(
                f"{name}.call.coverage", 90.0, why, 2.0, "equal", f"{name}: in 90% intervals", "%"
            ),
            Claim(
                f"{name}.time_share",
                0.2,
                why,
                0.0,
                "at most",
                f"{name}: time of the call in that of the first training",
            ),
        ]
    return found


CLAIMS = _claims()


class Rows(NamedTuple):
    """Standardized by the training rows."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in config.sets:
        splits = [
            log.once(f"{name} {number}", partial(_split_compared, name, number, config, log))
            for number in range(config.splits)
        ]
        results[name] = _averaged(splits)
        log.metrics(set=name, **results[name])
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    shown = {
        "rmse": "RMSE, in standard deviations of the targets",
        "log_density": "log density, nat",
        "coverage": "in 90% intervals, %",
    }
    return [
        bars(
            f"{name}: {label}",
            "network",
            {key: label},
            [{text: m[name][kind] for kind, text in NETWORKS.items()} for m in metrics],
            y_label=label,
        )
        for name in metrics[0]
        for key, label in shown.items()
    ]


def _averaged(splits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the divisions of a set."""
    means: dict[str, Any] = {
        kind: {key: fmean(split[kind][key] for split in splits) for key in splits[0][kind]}
        for kind in NETWORKS
    }
    for key in ("added", "cost", "seconds", "time_share"):
        means[key] = fmean(split[key] for split in splits)
    means["rmse_ratio"] = means["call"]["rmse"] / means["control"]["rmse"]
    means["log_density_gain"] = means["call"]["log_density"] - means["control"]["log_density"]
    return means | {"chosen": [split["chosen"] for split in splits]}


def _split_compared(name: str, number: int, config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean.training import TrainingConfig, add_uncertainty

    rows = _rows(name, 1000 * config.seed + number, config.made)
    tuning = partial(TrainingConfig, batch_size=config.batch_size, seed=config.seed)
    base = nn.Sequential(
        *(nn.Linear(rows.train[0].shape[1], config.width), nn.ReLU()),
        *(nn.Linear(config.width, config.width), nn.ReLU(), nn.Linear(config.width, 1)),
    )
    start = time.process_time()
    _train_(base, rows, tuning(epochs=config.epochs, lr=config.lr))
    trained = time.process_time()
    result = add_uncertainty(
        base,
        rows.train,
        rows.validation,
        config=tuning(epochs=config.call_epochs, lr=config.more_lr, log_alpha_lr=1e-2),
        num_samples=config.num_samples,
        accelerator="cpu",
        seed=config.seed,
        progress=False,
    )
    seconds = time.process_time() - trained
    control = copy.deepcopy(base)
    _train_(control, rows, tuning(epochs=config.control_epochs, lr=config.more_lr))
    return {
        "call": _measured(result.model, result.num_samples, rows.test, config),
        "control": _measured(_with_one_variance(control, rows), None, rows.test, config),
        "chosen": result.chosen,
        "added": float(result.added),
        "cost": result.after["passes for a prediction"],
        "seconds": seconds,
        "time_share": seconds / (trained - start),
    }


def _train_(model: nn.Module, rows: Rows, tuning: Any) -> None:
    from zeromean.training import fit

    with tempfile.TemporaryDirectory() as folder:
        fit(
            model,
            rows.train,
            tuning,
            folder=folder,
            likelihood=F.mse_loss,
            accelerator="cpu",
            progress=False,
        )
    model.eval()


def _with_one_variance(model: nn.Module, rows: Rows) -> nn.Module:
    from zeromean.training.post_hoc.calibrated import WithVariance

    inputs, targets = rows.validation
    with torch.no_grad():
        variance = (model(inputs) - targets).square().mean()
    return WithVariance(model, 1, variance.log())


def _measured(
    model: nn.Module, num_samples: int | None, test: tuple[Tensor, Tensor], config: Config
) -> dict[str, float]:
    samples = samples_of(model, test[0], num_samples, config.seed)
    found = Numbers(1).measures(samples, test[1])
    return {
        "rmse": found["RMSE"],
        "coverage": found["in 90% intervals, %"],
        "log_density": -Numbers(1).nll(samples, test[1]).mean().item(),
    }


def _rows(name: str, seed: int, made: int) -> Rows:
    from sklearn import datasets

    makers: dict[str, Any] = {
        "friedman1": partial(datasets.make_friedman1, noise=1.0),
        "friedman2": partial(datasets.make_friedman2, noise=100.0),
        "friedman3": partial(datasets.make_friedman3, noise=0.1),
    }
    if name in makers:
        x, y = makers[name](made, random_state=seed)
        sizes = (made // 5, made // 5)
    elif name == "diabetes":
        x, y = datasets.load_diabetes(return_X_y=True)
        sizes = (3 * len(y) // 5, len(y) // 5)
    else:
        raise ValueError(
            f"there is no data set {name!r}; choose from diabetes, {', '.join(makers)}."
        )
    order = np.random.default_rng(seed).permutation(len(y))
    first, second = sizes[0], sum(sizes)
    parts = order[:first], order[first:second], order[second:]

    def standardized(values: Any) -> Tensor:
        of_train = values[parts[0]]
        scaled = (values - of_train.mean(0)) / of_train.std(0)
        return torch.tensor(scaled, dtype=torch.float32).view(len(values), -1)

    inputs, targets = standardized(x), standardized(y)
    return Rows(*((inputs[part], targets[part]) for part in parts))
