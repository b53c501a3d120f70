"""Sets and intervals that hold with a chosen frequency whatever the network: through MAPIE.

Needs the extra `conformal`. What they promise is about examples like those of the calibration data,
on average over these, and not about each kind of example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeromean.arguments import require_choice, require_integer, shown
from zeromean.extras import how_to_install
from zeromean.prediction.classification import predict_proba
from zeromean.prediction.probabilities import OutputKind
from zeromean.prediction.regression import NoiseModel
from zeromean.prediction.sources import Source
from zeromean.uncertainty.arrays import (
    ArrayLike,
    as_labels,
    as_numbers,
    as_probabilities,
    like,
    require_fraction,
)
from zeromean.uncertainty.calibration import apply_temperature
from zeromean.uncertainty.mixture import Interval, predict_mixture

try:
    from mapie.classification import SplitConformalClassifier
    from mapie.regression import ConformalizedQuantileRegressor
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
except ImportError as error:
    raise ImportError(how_to_install("Conformal prediction needs MAPIE", "conformal")) from error

SCORES = ("lac", "aps", "raps", "top_k")


class _Trained(BaseEstimator):
    """What predicts and learns nothing more, as scikit-learn and MAPIE ask for it."""

    is_fitted = True

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def fit(self, X: Any, y: Any) -> Any:
        """Refused: the network is trained already."""
        raise RuntimeError(
            f"{type(self).__name__} wraps a network that is trained already, and does not train "
            "it; pass prefit=True to MAPIE."
        )


class TorchClassifier(ClassifierMixin, _Trained):
    """A trained torch network as scikit-learn and MAPIE see a classifier.

    For everything that takes a fitted classifier: `SplitConformalClassifier(TorchClassifier(…))`,
    `sklearn.metrics`, `sklearn.inspection`.

    Args:
        model: As `zm.predict_proba` takes it: one network, several, `zm.States`.
        classes: How many there are, or their names in the order of the outputs.
        num_samples: Draws of the noise.
        temperature: Of the averaged probabilities: see `fit_temperature`.
        outputs: "logits" or "probabilities": what the model returns, as of `zm.predict_proba`.
        seed: Of the noise, so that the same rows are predicted alike.
        batch_size: Rows that run at once. Default: all.
    """

    def __init__(
        self,
        model: Source,
        *,
        classes: int | Sequence[Any] = 2,
        num_samples: int = 20,
        temperature: float = 1.0,
        outputs: OutputKind | None = None,
        seed: int = 0,
        batch_size: int | None = None,
    ):
        self.model = model
        self.classes = classes
        self.num_samples = num_samples
        self.temperature = temperature
        self.outputs: OutputKind | None = outputs
        self.seed = seed
        self.batch_size = batch_size

    @property
    def classes_(self) -> np.ndarray:
        if isinstance(self.classes, (int, np.integer)):
            return np.arange(require_integer("classes", self.classes, at_least=2))
        return np.asarray(self.classes)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Averaged probabilities, `(rows, classes)`."""
        probabilities = predict_proba(
            self.model,
            _as_inputs(self.model, X),
            self.num_samples,
            outputs=self.outputs,
            seed=self.seed,
            batch_size=self.batch_size,
        )
        if probabilities.shape[1] != len(self.classes_):
            raise ValueError(
                f"The model returns {probabilities.shape[1]} classes, but classes= says "
                f"{len(self.classes_)}."
            )
        # In float64, so that they sum to 1 by anybody's count.
        return apply_temperature(probabilities.cpu().double(), self.temperature).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        return self.classes_[self.predict_proba(X).argmax(1)]


class TorchRegressor(RegressorMixin, _Trained):
    """A trained torch network as scikit-learn and MAPIE see a regressor of one target.

    Args:
        model: As `zm.predict_moments` takes it: one network, several, `zm.States`.
        likelihood: The likelihood of the training.
        quantile: Predict this quantile of the predictive distribution. Default: its mean.
        num_samples: Draws of the noise.
        seed: Of the noise, so that the same rows are predicted alike.
        batch_size: Rows that run at once. Default: all.
    """

    def __init__(
        self,
        model: Source,
        *,
        likelihood: NoiseModel | None = None,
        quantile: float | None = None,
        num_samples: int = 50,
        seed: int = 0,
        batch_size: int | None = None,
    ):
        self.model = model
        self.likelihood = likelihood
        self.quantile = quantile
        self.num_samples = num_samples
        self.seed = seed
        self.batch_size = batch_size

    def predict(self, X: Any) -> np.ndarray:
        """The mean or the quantile of each row."""
        mixture = predict_mixture(
            self.model,
            _as_inputs(self.model, X),
            self.num_samples,
            likelihood=self.likelihood,
            seed=self.seed,
            batch_size=self.batch_size,
        )
        chosen = mixture.mean if self.quantile is None else mixture.quantile(self.quantile)
        return _as_column("predictions", chosen).numpy()


def conformal_sets(
    probabilities: ArrayLike,
    *,
    calibration: tuple[Any, Any],
    level: float = 0.9,
    score: str = "lac",
) -> Any:
    """Sets of classes that have the label in them as often as `level` says.

    Args:
        probabilities: `(examples, classes)`, from any source.
        calibration: `(probabilities, labels)` of examples that the network was not trained on.
        level: How often, on average over examples and calibration data.
        score: "lac" makes the smallest sets, some of them empty where nothing fits; "aps" and
            "raps" make sets that are larger where the network is less sure; "top_k" equal ones.

    Returns:
        `(examples, classes)`, whether each class is in the set, in the form of the probabilities.
    """
    numbers = as_probabilities(probabilities)
    known = as_probabilities(calibration[0], "calibration probabilities")
    labels = as_labels(calibration[1], known, "calibration labels")
    require_choice("score", score, SCORES)
    if known.shape[1] != numbers.shape[1]:
        raise ValueError(
            f"Calibration data must have as many classes as the probabilities, {numbers.shape[1]}, "
            f"got {known.shape[1]}."
        )
    if len(labels.unique()) == 1:
        raise ValueError(
            f"Prediction sets need calibration labels of at least two classes, got {len(labels)} "
            f"of class {int(labels[0])}."
        )
    level = _require_enough(level, len(labels))
    conformal = SplitConformalClassifier(
        _AsGiven(numbers.shape[1]), confidence_level=level, conformity_score=score, random_state=0
    )
    conformal.conformalize(_normalized(known), labels.numpy())
    _, sets = conformal.predict_set(_normalized(numbers))
    return like(torch.from_numpy(np.asarray(sets)[:, :, 0].astype(bool)), probabilities)


def conformal_intervals(
    interval: Interval, *, calibration: tuple[Interval, Any], level: float = 0.9
) -> Interval:
    """Intervals moved in or out so that targets lie in them as often as `level` says.

    Conformalized quantile regression (Romano et al., 2019): all move by the same distance, so that
    the width goes on to follow the network's own uncertainty.

    Args:
        interval: From `predict_interval`, or any `Interval(lower, upper)`.
        calibration: `(interval, targets)` of examples that the network was not trained on.
        level: How often, on average over examples and calibration data.
    """
    bounds, shape = _as_bounds("interval", interval)
    known, known_shape = _as_bounds("calibration interval", calibration[0])
    targets = as_numbers("calibration targets", calibration[1])
    if targets.shape != known_shape:
        raise ValueError(
            f"Calibration targets must have the shape of their intervals, {tuple(known_shape)}, "
            f"got {tuple(targets.shape)}; reshape them."
        )
    level = _require_enough(level, len(known))
    faces: list[Any] = [_Column(column) for column in range(3)]
    conformal = ConformalizedQuantileRegressor(faces, confidence_level=level, prefit=True)
    conformal.conformalize(known, targets.flatten().numpy())
    _, moved = conformal.predict_interval(bounds, symmetric_correction=True)
    lower, upper = torch.from_numpy(np.asarray(moved)[:, :, 0]).T
    return Interval(lower.reshape(shape), upper.reshape(shape))


class _AsGiven(ClassifierMixin, _Trained):
    """What has its probabilities as rows already."""

    def __init__(self, num_classes: int):
        self.num_classes = num_classes

    @property
    def classes_(self) -> np.ndarray:
        return np.arange(self.num_classes)

    def predict_proba(self, X: Any) -> np.ndarray:
        return np.asarray(X)

    def predict(self, X: Any) -> np.ndarray:
        return np.asarray(X).argmax(1)


class _Column(RegressorMixin, _Trained):
    """What has its predictions as a column of the rows already."""

    def __init__(self, column: int):
        self.column = column

    def predict(self, X: Any) -> np.ndarray:
        return np.asarray(X)[:, self.column]


def _require_enough(level: float, num_examples: int) -> float:
    level = require_fraction("level", level, ends="()")
    needed = math.ceil(level / (1 - level) - 1e-9)
    if num_examples < needed:
        raise ValueError(
            f"A level of {level} needs at least {needed} calibration examples, got {num_examples}."
        )
    return level


def _normalized(probabilities: Tensor) -> np.ndarray:
    return (probabilities / probabilities.sum(1, keepdim=True)).numpy()


def _as_bounds(name: str, interval: Any) -> tuple[np.ndarray, torch.Size]:
    """Lower, upper and middle as columns, and the shape of each."""
    if not isinstance(interval, tuple) or len(interval) != 2:
        raise TypeError(f"{name} must be an Interval(lower, upper), got {shown(interval)}.")
    lower, upper = (as_numbers(f"{name} bounds", bound) for bound in interval)
    if lower.shape != upper.shape:
        raise ValueError(
            f"{name} bounds must have one shape, got {tuple(lower.shape)} and {tuple(upper.shape)}."
        )
    columns = [_as_column(name, bound) for bound in (lower, upper, (lower + upper) / 2)]
    return torch.stack(columns, 1).numpy(), lower.shape


def _as_column(name: str, values: Tensor) -> Tensor:
    if values.dim() == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dim() != 1:
        raise ValueError(f"{name} must be of one target, got shape {tuple(values.shape)}.")
    return values


def _as_inputs(model: Any, X: Any) -> Tensor:
    rows = X if isinstance(X, Tensor) else torch.from_numpy(np.ascontiguousarray(X))
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    if not rows.is_floating_point() or not parameters:
        return rows if rows.dtype != torch.float64 else rows.float()
    return rows.to(parameters[0].device, parameters[0].dtype)
