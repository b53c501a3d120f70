"""What the experiments on sparse linear models share: data, and how a model is measured."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Seconds after which a fit is not repeated.
LONG_FIT = 2.0
Models = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class Rows:
    """Training and test rows; `relevant` is the truth about the features, where it is known."""

    X: Any
    y: Any
    test_X: Any  # noqa: N815
    test_y: Any
    relevant: Any = None


def synthetic(
    *,
    num_train: int,
    num_test: int,
    num_relevant: int,
    num_irrelevant: int,
    weights: tuple[float, float],
    noise_variance: float,
    seed: int,
) -> Rows:
    """Normal features, of which the first have weights of random sign, in `weights` by size."""
    rng = np.random.default_rng(seed)
    true = np.zeros(num_relevant + num_irrelevant)
    true[:num_relevant] = rng.choice([-1, 1], num_relevant) * rng.uniform(*weights, num_relevant)

    def draw(count: int) -> tuple[Any, Any]:
        X = rng.normal(size=(count, len(true)))
        return X, X @ true + np.sqrt(noise_variance) * rng.normal(size=count)

    return Rows(*draw(num_train), *draw(num_test), true != 0)


def as_classes(rows: Rows) -> Rows:
    """The same rows with the sign of the target for a class."""
    return Rows(rows.X, rows.y > 0, rows.test_X, rows.test_y > 0, rows.relevant)


def measure(model: Any, rows: Rows) -> dict[str, float]:
    """Fit a model: test error, relevant features and, where the truth is known, how many are right.

    The error is the mean square, or the share of wrong classes together with the log loss. Time is
    CPU time of the fit, of a quick one the median of three: the first pays for memory that others
    find ready.
    """
    from sklearn.exceptions import ConvergenceWarning

    times: list[float] = []
    while len(times) < 3 and sum(times) < LONG_FIT:
        started = time.process_time()
        with warnings.catch_warnings():
            # Lasso and ARDRegression complain where features are many.
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", FutureWarning)
            model.fit(rows.X, rows.y)
        times.append(time.process_time() - started)
    seconds = statistics.median(times)
    found = (np.atleast_2d(model.coef_) != 0).any(axis=0)
    result = {"seconds": seconds, "features": int(found.sum())}
    predicted = model.predict(rows.test_X)
    if hasattr(model, "classes_"):
        result["error"] = float(np.mean(predicted != rows.test_y))
        result["accuracy"] = 1 - result["error"]
    else:
        result["error"] = float(np.mean((predicted - rows.test_y) ** 2))
    if hasattr(model, "predict_proba"):
        columns = np.searchsorted(model.classes_, rows.test_y)
        probability = model.predict_proba(rows.test_X)[np.arange(len(columns)), columns]
        result["log_loss"] = float(-np.log(np.maximum(probability, 1e-12)).mean())
    if rows.relevant is not None:
        result["irrelevant_found"] = int((~found & ~rows.relevant).sum())
        result["relevant_lost"] = int((~found & rows.relevant).sum())
        result["relevance_accuracy"] = float(np.mean(found == rows.relevant))
    return result


def measure_all(models: Models, rows: Rows) -> dict[str, dict[str, float]]:
    return {name: measure(build(), rows) for name, build in models.items()}
