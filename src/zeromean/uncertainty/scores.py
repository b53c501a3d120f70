"""Proper scores of class probabilities: what honest probabilities make smallest."""

from __future__ import annotations

import torch
from torch import Tensor

from zeromean.uncertainty.arrays import ArrayLike, as_labels, as_probabilities


def negative_log_likelihood(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Average of −log p(label), in nats.

    A probability of zero counts as the smallest of float32, which is what softmax in float32 makes
    of anything smaller: 87 nats.
    """
    numbers = as_probabilities(probabilities)
    return -log_likelihoods(numbers, as_labels(labels, numbers)).mean().item()


def brier_score(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Average squared distance to the label's indicator, summed over classes: from 0 to 2."""
    numbers = as_probabilities(probabilities)
    indicator = torch.nn.functional.one_hot(as_labels(labels, numbers), numbers.shape[1])
    return (numbers - indicator).square().sum(1).mean().item()


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Share of examples whose most probable class is their label."""
    numbers = as_probabilities(probabilities)
    return (numbers.argmax(1) == as_labels(labels, numbers)).double().mean().item()


def log_probabilities(probabilities: Tensor) -> Tensor:
    """Logarithms that stay finite where float32 had no room for the probability."""
    return probabilities.clamp_min(torch.finfo(torch.float32).tiny).log()


def log_likelihoods(probabilities: Tensor, labels: Tensor) -> Tensor:
    """log p(label) of every example."""
    return log_probabilities(probabilities.gather(1, labels[:, None])[:, 0])
