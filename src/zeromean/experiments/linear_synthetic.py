"""The talk's table: ten relevant features among a thousand, with as many objects.

The talk does not say how its data were made. Ours: normal features, weights of random sign, normal
noise of variance 0.1; a class is the sign of the target, without its noise and with it. The noise
precision of the regression is given, as it may have been there, and learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zeromean.experiments import linear_models
from zeromean.experiments.claims import Claim
from zeromean.experiments.figure import bars, figure, over_seeds
from zeromean.experiments.run_log import RunLog

TITLE = "Linear models: ten relevant features among a thousand"
SOURCE = "Molchanov & Ashuha (2016), talk: more features"
NEEDS: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    """Normal features, a few of them relevant."""

    num_train: int = 1000
    """Objects to learn from."""
    num_test: int = 10_000
    """Objects to test on."""
    num_relevant: int = 10
    """Features with a weight."""
    num_irrelevant: int = 990
    """Features without."""
    weights: tuple[float, float] = (0.5, 1.5)
    """Smallest and largest size of a weight."""
    noise_variance: float = 0.1
    """Variance of the noise on the target."""
    seed: int = 0
    """Seed of the data."""


QUICK = Config()
SMOKE = Config(num_train=120, num_test=500, num_relevant=3, num_irrelevant=57)
NOTES = (
    "At the exact optimum of the talk's objective about 19% of the irrelevant features keep a "
    "weight with log α below 3, whatever the start: any feature whose gradient exceeds one "
    "standard error does. Our mean is below the talk's 816 of 990, which lies within the spread "
    "of our single runs (their standard deviation is 13); the tolerances of the numbers of "
    "features are two such deviations.",
    "The talk does not say how its classes were drawn. We tried the sign of the noisy target "
    "first: variational dropout then finds about 963 of 990, fewer than the talk's 984. The claims "
    "are about classes without noise, which give the talk's numbers of features at a higher "
    "accuracy, so its data were neither; both are shown.",
    "The bound is not to be trusted with the noise precision where features are as many as "
    "objects: maximised over it too, it takes noise for signal. By default evidence sets it.",
    "The relevance vector machine of the talk has no price for a feature. With ours, a uniform "
    "prior over the number of relevant features, it finds nearly all that is irrelevant, and its "
    "error is that of the true features alone. Without (classical) it keeps a fifth of them.",
)
LOG_ALPHAS = tuple(range(-4, 9))
TASKS = ("regression", "classification", "noisy classification")


def _claims() -> list[Claim]:
    source = "talk, more features"
    return [
        Claim(
            "regression.vd, noise given.error",
            0.119,
            source,
            0,
            "at most",
            "VD-RVR: test error",
        ),
        Claim(
            "regression.vd, noise given.irrelevant_found",
            816,
            source,
            26,
            "at least",
            "VD-RVR: irrelevant features found (the talk's single run, ± 2 deviations of ours)",
        ),
        Claim("regression.rvm, noise given.error", 0.128, source, 0, "at most", "RVR: test error"),
        Claim(
            "regression.rvm, noise given.irrelevant_found",
            990,
            source,
            1.5,
            "at least",
            "RVR: irrelevant features found (the talk's single run, ± 2 deviations of ours)",
        ),
        Claim("classification.vd.accuracy", 0.916, source, 0, "at least", "VD-RVC: test accuracy"),
        Claim(
            "classification.vd.irrelevant_found",
            984,
            source,
            5,
            "at least",
            "VD-RVC: irrelevant features found (the talk's single run, ± 2 deviations of ours)",
        ),
        Claim("classification.rvm.accuracy", 0.907, source, 0, "at least", "RVC: test accuracy"),
        Claim(
            "classification.rvm.irrelevant_found",
            983,
            source,
            0,
            "at least",
            "RVC: irrelevant features found",
        ),
        Claim("relevant_lost", 0, "ours", label="relevant features lost, by any of our models"),
    ]


CLAIMS = _claims()


def run(config: Config, log: RunLog) -> dict[str, Any]:
    return log.once("models", lambda: _measure(config, log))


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    drawn = [
        bars(
            f"{task.capitalize()}: irrelevant features found",
            "model",
            {"irrelevant_found": "found"},
            [m[task] for m in metrics],
            y_label="features",
        )
        for task in TASKS
    ]
    drawn.append(
        bars(
            "Regression: test error",
            "model",
            {"error": "test"},
            [m["regression"] for m in metrics],
            y_label="mean squared error",
        )
    )
    curves = [
        over_seeds(
            f"{task}, {kind}",
            LOG_ALPHAS,
            [m["by_threshold"][task][kind] for m in metrics],
        )
        for task in ("regression", "classification")
        for kind in ("irrelevant found", "relevant found")
    ]
    drawn.append(
        figure(
            "Variational dropout: features found, by the threshold of log α",
            "threshold of log α",
            "share",
            curves,
        )
    )
    return drawn


def _measure(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean.estimators import (
        RVMClassifier,
        RVMRegressor,
        VariationalDropoutClassifier,
        VariationalDropoutRegressor,
    )

    draw = partial(
        linear_models.synthetic,
        num_train=config.num_train,
        num_test=config.num_test,
        num_relevant=config.num_relevant,
        num_irrelevant=config.num_irrelevant,
        weights=config.weights,
        seed=config.seed,
    )
    rows = draw(noise_variance=config.noise_variance)
    classes = linear_models.as_classes(draw(noise_variance=0.0))
    noisy_classes = linear_models.as_classes(rows)
    precision = 1 / config.noise_variance
    dropout, machine = VariationalDropoutRegressor, RVMRegressor
    regression = linear_models.measure_all(
        {
            "vd, noise given": partial(dropout, noise_precision=precision),
            "vd, noise by evidence": dropout,
            "vd, noise by bound": partial(dropout, noise_precision="elbo"),
            "rvm, noise given": partial(machine, noise_precision=precision),
            "rvm": machine,
            "classical rvm, noise given": partial(machine, noise_precision=precision, threshold=0),
        },
        rows,
    )
    classifiers = {
        "vd": VariationalDropoutClassifier,
        "vd, sampling": partial(
            VariationalDropoutClassifier, integration="sampling", random_state=config.seed
        ),
        "rvm": RVMClassifier,
        "classical rvm": partial(RVMClassifier, threshold=0),
    }
    results = {
        "regression": regression,
        "classification": linear_models.measure_all(classifiers, classes),
        "noisy classification": linear_models.measure_all(classifiers, noisy_classes),
    }
    log.metrics(**results)
    every = [result for task in results.values() for result in task.values()]
    return {
        **results,
        "relevant_lost": sum(result["relevant_lost"] for result in every),
        "by_threshold": {
            "regression": _by_threshold(dropout(noise_precision=precision), rows),
            "classification": _by_threshold(VariationalDropoutClassifier(), classes),
        },
    }


def _by_threshold(model: Any, rows: linear_models.Rows) -> dict[str, list[float]]:
    log_alpha = np.ravel(model.fit(rows.X, rows.y).log_alpha_)
    found = [log_alpha < threshold for threshold in LOG_ALPHAS]
    return {
        "irrelevant found": [float(np.mean(~f[~rows.relevant])) for f in found],
        "relevant found": [float(np.mean(f[rows.relevant])) for f in found],
    }
