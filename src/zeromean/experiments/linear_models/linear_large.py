"""The talk's curves: 100,000 examples, 100 features, compared with scikit-learn's models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zeromean.experiments.linear_models import data_sets
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog

TITLE = "Linear models: 100,000 objects, 100 features"
SOURCE = "Molchanov & Ashuha (2016), talk: linear and logistic regression"
NEEDS: tuple[str, ...] = ()
COVERS = ("talk: linear regression", "talk: logistic regression")
TIMINGS = ("*.seconds", "speed_up.*")
LABELS = {
    "vd": "variational dropout",
    "rvm": "RVM",
    "ard": "ARDRegression",
    "lasso": "LassoCV",
    "l1": "LogisticRegressionCV, l1",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Normal features, a fifth of them relevant, some of these weak."""

    sizes: tuple[int, ...] = (300, 1000, 3000, 10_000, 30_000, 100_000)
    """Numbers of examples to learn from."""
    num_test: int = 20_000
    """Examples to test on."""
    num_relevant: int = 20
    """Features with a weight."""
    num_irrelevant: int = 80
    """Features without."""
    weights: tuple[float, float] = (0.02, 0.5)
    """Smallest and largest size of a weight."""
    noise_variance: float = 1.0
    """Variance of the noise on the target, whose sign is the class."""
    num_penalties: int = 10
    """Penalties that LogisticRegressionCV chooses from."""
    seed: int = 0
    """Seed of the data."""


QUICK = Config(sizes=(300, 1000, 3000, 10_000))
SMOKE = Config(sizes=(200, 400), num_test=500, num_relevant=3, num_irrelevant=9, num_penalties=3)
NOTES = (
    "Nearly all of our time is one product XᵀX, of which ARDRegression makes one an "
    "iteration, and with independent features, most of them irrelevant, it needs only two or "
    "three. Times here are medians of three fits, and vary from seed to seed; "
    "`benchmarks/linear_models.py` measures them more closely, also with correlated features "
    "and in the first fit of a process.",
)
CLAIMS = [
    Claim(
        "speed_up.regression",
        5.0,
        ours(),
        0,
        "at least",
        "regression: ARDRegression's time divided by ours, at the largest size",
        statistic="median",
    ),
    Claim(
        "error_ratio.regression",
        1.0,
        ours(),
        1e-3,
        "at most",
        "regression: our error divided by that of the better of ARD and lasso, at the largest size",
    ),
    Claim(
        "error_ratio.classification",
        1.0,
        ours(),
        5e-3,
        "at most",
        "classification: our error divided by that of l1 logistic regression, at the largest size",
    ),
    Claim(
        "speed_up.classification",
        1.0,
        ours(),
        0,
        "at least",
        "classification: LogisticRegressionCV's time divided by ours, at the largest size",
        statistic="median",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    curves: dict[str, dict[str, list[dict[str, float]]]] = {}
    for size in config.sizes:
        at_size = log.once(f"size-{size}", partial(_measure, config, size))
        log.metrics(size=size, **at_size)
        for task, results in at_size.items():
            for name, result in results.items():
                curves.setdefault(task, {}).setdefault(name, []).append(result)
    regression, classification = (
        {name: results[-1] for name, results in curves[task].items()}
        for task in ("regression", "classification")
    )
    best = min(regression[name]["error"] for name in ("ard", "lasso"))
    return {
        "sizes": config.sizes,
        "curves": curves,
        "at_end": {"regression": regression, "classification": classification},
        "error_ratio": {
            "regression": regression["vd"]["error"] / best,
            "classification": classification["vd"]["error"] / classification["l1"]["error"],
        },
        "speed_up": {
            "regression": regression["ard"]["seconds"] / regression["vd"]["seconds"],
            "classification": classification["l1"]["seconds"] / classification["vd"]["seconds"],
        },
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    drawn = []
    for task in ("regression", "classification"):
        error = "mean squared error" if task == "regression" else "share of wrong classes"
        kinds = {
            "error": ("test error", error, False),
            "seconds": ("CPU time of the fit", "s", True),
            "relevance_accuracy": ("features judged rightly", "share", False),
        }
        for key, (title, y_label, y_log) in kinds.items():
            traces = [
                over_seeds(
                    LABELS[name],
                    metrics[0]["sizes"],
                    [[point[key] for point in m["curves"][task][name]] for m in metrics],
                )
                for name in metrics[0]["curves"][task]
            ]
            drawn.append(
                figure(
                    f"{task.capitalize()}: {title}",
                    "objects",
                    y_label,
                    traces,
                    x_log=True,
                    y_log=y_log,
                )
            )
    return drawn


def _measure(config: Config, size: int) -> dict[str, Any]:
    from sklearn.linear_model import ARDRegression, LassoCV, LogisticRegressionCV

    from zeromean.estimators import (
        RVMClassifier,
        RVMRegressor,
        VariationalDropoutClassifier,
        VariationalDropoutRegressor,
    )

    rows = data_sets.synthetic(
        num_train=size,
        num_test=config.num_test,
        num_relevant=config.num_relevant,
        num_irrelevant=config.num_irrelevant,
        weights=config.weights,
        noise_variance=config.noise_variance,
        seed=config.seed,
    )
    logistic: Any = LogisticRegressionCV
    lasso_logistic = partial(
        logistic,
        l1_ratios=(1.0,),
        solver="liblinear",
        Cs=config.num_penalties,
        cv=3,
        scoring="neg_log_loss",
        use_legacy_attributes=False,
    )
    return {
        "regression": data_sets.measure_all(
            {
                "vd": VariationalDropoutRegressor,
                "rvm": RVMRegressor,
                "ard": ARDRegression,
                "lasso": LassoCV,
            },
            rows,
        ),
        "classification": data_sets.measure_all(
            {"vd": VariationalDropoutClassifier, "rvm": RVMClassifier, "l1": lasso_logistic},
            data_sets.as_classes(rows),
        ),
    }
