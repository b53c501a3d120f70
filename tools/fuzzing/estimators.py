"""Linear models on tables of every scale, rank and type."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from fuzzing.outcomes import CHECKED, refused, require, spoil
from zeromean.estimators import (
    RVMClassifier,
    RVMRegressor,
    VariationalDropoutClassifier,
    VariationalDropoutRegressor,
)

MODELS = (RVMRegressor, VariationalDropoutRegressor, RVMClassifier, VariationalDropoutClassifier)
SCALES = (1.0, 1.0, 1e-3, 1e6, 1e-100, 1e-170, 1e100, 1e160, 1e300)
# Predictions agree this well, however rows are given.
SAME = 1e-5


def prepare(folder: Path) -> Callable[[random.Random], str]:
    return case


def case(generator: random.Random) -> str:
    pick = generator.choice
    rng = np.random.default_rng(generator.getrandbits(32))
    model_class = pick(MODELS)
    regression = model_class in MODELS[:2]
    X, y, weight, form = _table(generator, rng, regression)
    options: dict[str, Any] = {"fit_intercept": pick((True, True, False)), "max_iter": 50}
    if generator.random() < 0.1:
        options["tol"] = pick((1e-3, 1e-8))
    spoil(options, generator, 0.08)
    rows = sparse.csr_array(X) if form == "sparse" else X
    try:
        model = model_class(**options).fit(rows, y, sample_weight=weight)
        predicted = model.predict(rows)
    except (TypeError, ValueError) as error:
        return refused(error)
    require(np.isfinite(model.coef_).all(), "coefficients are not finite")
    require(np.isfinite(model.intercept_).all(), "the intercept is not finite")
    require(predicted.shape == (len(X),), f"predictions of shape {predicted.shape}")
    if regression:
        _check_regression(model, X, y, predicted, rows, weight)
    else:
        _check_classification(model, y, predicted, rows)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    require(np.array_equal(other.predict(rows), predicted), "a copy predicts otherwise")
    if weight is None and form == "dense" and generator.random() < 0.3:
        _check_chunks(model_class, options, X, y, model, regression)
    return CHECKED


def _table(generator: random.Random, rng: np.random.Generator, regression: bool) -> Any:
    pick = generator.choice
    num, features = pick((1, 2, 5, 20, 40)), pick((1, 2, 3, 8, 30))
    X = rng.normal(size=(num, features))
    kind = pick(("full", "full", "rank", "repeated", "integers", "binary", "constant"))
    if kind == "rank":
        X = rng.normal(size=(num, 1)) @ rng.normal(size=(1, features))
    elif kind == "repeated":
        X = X[:, rng.integers(features, size=features)]
    elif kind == "integers":
        X = rng.integers(-3, 4, size=X.shape).astype(float)
    elif kind == "binary":
        X = (X > 0).astype(float)
    elif kind == "constant":
        X[:, rng.integers(features)] = pick((0.0, 1.0, 1e8))
    signal = X[:, 0] - 0.5 * X[:, -1] + 0.3 * rng.normal(size=num)
    X = X * pick(SCALES) + pick((0.0, 0.0, 1.0, 1e6))
    if generator.random() < 0.2:
        X = X * np.array([pick(SCALES[:6]) for _ in range(features)])
    if regression:
        y = signal * pick(SCALES) + pick((0.0, 0.0, 3.0, 1e9))
        y = np.full(num, pick((0.0, 2.5))) if generator.random() < 0.05 else y
    else:
        classes = pick((2, 2, 3))
        y = np.digitize(signal, np.linspace(-1, 1, classes + 1)[1:-1])
        y = np.array(["no", "yes", "maybe"])[y] if generator.random() < 0.2 else y
    form = pick(("dense", "dense", "sparse", "float32", "fortran", "list"))
    with np.errstate(over="ignore"):
        if form == "float32":
            X = X.astype(np.float32)
    X = np.asfortranarray(X) if form == "fortran" else X
    if generator.random() < 0.06:
        X = X.copy()
        X[rng.integers(num), rng.integers(features)] = pick((np.nan, np.inf))
    weight = None
    if generator.random() < 0.3:
        weight = pick(
            (
                rng.random(num),
                rng.integers(0, 3, size=num),
                np.zeros(num),
                np.full(num, 1e-12),
                -np.ones(num),
            )
        )
    return X, y, weight, form


def _check_regression(model: Any, X: Any, y: Any, predicted: Any, rows: Any, weight: Any) -> None:
    require(np.isfinite(predicted).all(), "predictions are not finite")
    mean, std = model.predict(rows, return_std=True)
    require(np.array_equal(mean, predicted), "a mean depends on whether its spread is wanted")
    require(np.isfinite(std).all() and (std >= 0).all(), f"spreads {std.min()} to {std.max()}")
    require(model.noise_precision_ > 0, f"a noise precision of {model.noise_precision_}")
    require((model.coef_[~model.relevance_] == 0).all(), "an irrelevant feature has a weight")
    by_hand = np.asarray(X, dtype=np.float64) @ model.coef_ + model.intercept_
    size = np.abs(np.asarray(X, dtype=np.float64)) @ np.abs(model.coef_) + abs(model.intercept_)
    require((np.abs(by_hand - predicted) <= 1e-5 * size + 1e-300).all(), "not coef · x + intercept")
    if weight is None and len(y) >= 20 and model.fit_intercept is True:
        # No worse than the mean of the target, which is among the models.
        residual, spread = (
            np.square((y - predicted) / _unit(y)).mean(),
            np.square((y - y.mean()) / _unit(y)).mean(),
        )
        require(residual <= 1.05 * spread + 1e-12, f"worse than a constant: {residual} to {spread}")


def _unit(y: Any) -> float:
    return float(np.abs(y - y.mean()).max()) or 1.0


def _check_classification(model: Any, y: Any, predicted: Any, rows: Any) -> None:
    require(set(predicted) <= set(y), "a class that is not there")
    chances = model.predict_proba(rows)
    require(chances.shape == (len(y), len(model.classes_)), f"probabilities {chances.shape}")
    require(np.isfinite(chances).all() and (chances >= 0).all(), "probabilities are not sane")
    require(np.allclose(chances.sum(axis=1), 1), "probabilities do not add to one")
    best = chances.max(axis=1)
    index = np.searchsorted(model.classes_, predicted)
    require(np.allclose(chances[np.arange(len(y)), index], best), "not the likeliest class")


def _check_chunks(
    model_class: Any, options: Any, X: Any, y: Any, model: Any, regression: bool
) -> None:
    """Rows in two chunks give the same model."""
    half = len(X) // 2
    chunks = [(X[:half], y[:half]), (X[half:], y[half:])]
    try:
        other = model_class(**options).fit_chunks(lambda: (each for each in chunks if len(each[0])))
    except (TypeError, ValueError) as error:
        refused(error)
        return
    if regression:
        size = np.abs(y).max() + np.abs(model.predict(X)).max()
        close = np.abs(other.predict(X) - model.predict(X)) <= 0.05 * size + 1e-300
        require(close.mean() > 0.9, "chunks give another model")
