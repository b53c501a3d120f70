"""Whether probabilities are as high as the predictions are often right, and their temperature."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeromean.arguments import require_integer, require_numbers, require_seed
from zeromean.uncertainty.arrays import (
    Array,
    ArrayLike,
    as_labels,
    as_probabilities,
    like,
    require_count,
)
from zeromean.uncertainty.scores import log_probabilities

# Temperatures are looked for between these; nothing useful lies outside.
_COLDEST, _HOTTEST = 1e-2, 1e2


class Reliability(NamedTuple):
    """Bins of confidence, which is the highest probability of an example; empty ones left out."""

    confidence: Tensor
    """Average confidence in each bin."""
    accuracy: Tensor
    """How often the predictions of the bin are right."""
    count: Tensor
    """Examples in the bin."""

    @property
    def calibration_error(self) -> float:
        """The average of |accuracy − confidence| over the examples."""
        gap = (self.accuracy - self.confidence).abs()
        return ((gap * self.count).sum() / self.count.sum()).item()


def reliability(
    probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15, adaptive: bool = False
) -> Reliability:
    """Confidence and accuracy by bin, as a reliability diagram shows them (`plot_reliability`).

    Args:
        bins: How many of them divide [0, 1].
        adaptive: Bins with equally many examples, rather than of equal width. Examples of equal
            confidence stay together, so that there may be fewer.
    """
    numbers = as_probabilities(probabilities)
    right = numbers.argmax(1) == as_labels(labels, numbers)
    confidence = numbers.amax(1).clamp_max(1)
    bins = require_count("bins", bins)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    if adaptive:
        edges = confidence.quantile(edges)
    # Bins are open on the left: (0, 1/15], (1/15, 2/15], … (Guo et al., 2017).
    place = torch.bucketize(confidence, edges[1:-1].contiguous())
    count = place.bincount(minlength=bins)
    used = count > 0
    sums = (place.bincount(values, bins)[used] for values in (confidence, right.double()))
    mean_confidence, accuracy = (total / count[used] for total in sums)
    return Reliability(mean_confidence, accuracy, count[used])


def calibration_error(
    probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15, adaptive: bool = False
) -> float:
    """Expected calibration error (ECE) of the predicted classes.

    The average of |accuracy − confidence| over bins of confidence, each weighted by its examples.
    It has a bias: even perfect probabilities have an error of about √(bins / examples).

    Args:
        bins: How many of them divide [0, 1].
        adaptive: Bins with equally many examples, rather than of equal width.
    """
    return reliability(probabilities, labels, bins=bins, adaptive=adaptive).calibration_error


def fit_temperature(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """The temperature T at which softmax(log p / T) has the smallest negative log-likelihood.

    For averaged probabilities as well as for those of one network. Above 1 it makes predictions
    less sure. Fit it on examples that the network was not trained on.
    """
    numbers = as_probabilities(probabilities)
    classes = as_labels(labels, numbers)
    if len(classes.unique()) == 1:
        raise ValueError(
            f"A temperature needs labels of at least two classes, got {len(classes)} of class "
            f"{int(classes[0])}."
        )
    temperature = _best_temperature(numbers, classes)
    if temperature is None:
        warnings.warn(
            f"All {len(classes)} predictions are right, so that a smaller temperature always fits "
            "better; it stays 1. Use more examples, some of which are predicted wrongly.",
            stacklevel=2,
        )
        return 1.0
    return temperature


def apply_temperature(probabilities: Array, temperature: float) -> Array:
    """softmax(log p / T), in the form and type of what was given."""
    numbers = as_probabilities(probabilities)
    require_numbers(temperature=temperature)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}.")
    return like(_scaled(numbers, temperature).exp(), probabilities)


def calibrated_log_likelihood(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    calibration: tuple[Any, Any] | None = None,
    splits: int = 5,
    seed: int = 0,
) -> float:
    """Average of log p(label) at the best temperature, in nats; higher is better.

    Without it comparisons are unfair: of two methods the one whose temperature happens to fit wins
    (Ashukha et al., 2020, arXiv 2002.06470). The temperature is fitted on one half of the examples
    and used on the other, both ways, averaged over random halves; or on calibration data.

    Args:
        calibration: `(probabilities, labels)` to fit the temperature on, in place of halves.
        splits: How often the examples are halved.
        seed: Of the halves.
    """
    numbers = as_probabilities(probabilities)
    classes = as_labels(labels, numbers)
    if calibration is not None:
        scaled = _scaled(numbers, fit_temperature(*calibration))
        return scaled.gather(1, classes[:, None]).mean().item()
    splits = require_integer("splits", splits, at_least=1)
    if len(classes) < 4:
        raise ValueError(
            f"Fitting on one half of the examples and judging on the other needs at least 4, got "
            f"{len(classes)}; pass calibration=(probabilities, labels)."
        )
    generator = torch.Generator().manual_seed(require_seed(seed))
    total = 0.0
    for _ in range(splits):
        order = torch.randperm(len(classes), generator=generator)
        halves = order.tensor_split(2)
        for fit, test in (halves, halves[::-1]):
            # Where all of a half is right there is nothing to fit.
            temperature = _best_temperature(numbers[fit], classes[fit]) or 1.0
            scaled = _scaled(numbers[test], temperature)
            total += scaled.gather(1, classes[test, None]).sum().item()
    return total / (splits * len(classes))


def _scaled(probabilities: Tensor, temperature: float) -> Tensor:
    """log softmax(log p / T)."""
    return (log_probabilities(probabilities) / temperature).log_softmax(1)


def _best_temperature(probabilities: Tensor, labels: Tensor) -> float | None:
    """None where the loss falls for ever as the temperature does: every label is the winner."""
    logs = log_probabilities(probabilities)
    of_label = logs.gather(1, labels[:, None])[:, 0]
    if (of_label >= logs.amax(1)).all():
        return None
    mean = of_label.mean()
    # In 1/T the loss is convex. Newton's steps on its slope, E_q[log p] − log p(label), are taken
    # where they stay within the bounds that its sign has shown, and halves of these elsewhere.
    low, high, sharpness = 1 / _HOTTEST, 1 / _COLDEST, 1.0
    for _ in range(100):
        scaled = (logs * sharpness).softmax(1)
        expected = (scaled * logs).sum(1)
        slope = (expected.mean() - mean).item()
        curvature = ((scaled * logs.square()).sum(1) - expected.square()).mean().item()
        low, high = (low, sharpness) if slope > 0 else (sharpness, high)
        step = sharpness - slope / curvature if curvature > 0 else low
        step = step if low < step < high else (low * high) ** 0.5
        if abs(step - sharpness) < 1e-9 * sharpness:
            break
        sharpness = step
    return 1 / sharpness
