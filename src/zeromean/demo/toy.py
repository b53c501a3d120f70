"""The toy problem of Figure 1: two neurons whose variances alone tell four classes apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean.demo.digits import accuracy

CENTRES = ((3.0, 3.0), (3.0, 10.0), (10.0, 3.0), (10.0, 10.0))


def draw_points(points_per_class: int) -> tuple[Tensor, Tensor]:
    """Points `(n, 2)` around the four centres, with unit covariance, and their classes."""
    labels = torch.arange(len(CENTRES)).repeat_interleave(points_per_class)
    centres = torch.tensor(CENTRES)[labels]
    return centres + torch.randn_like(centres), labels


def build_network() -> nn.Sequential:
    """Six dense layers, the fifth a variance layer with two outputs, and a linear classifier.

    As the authors' code has it: the paper's "six" leaves the classifier out. Its two halves are
    an encoder that ends in the variance layer, and what reads the encoding.
    """
    encoder = nn.Sequential(
        nn.Linear(2, 100),
        nn.LeakyReLU(),
        nn.Linear(100, 100),
        nn.LeakyReLU(),
        nn.Linear(100, 100),
        nn.LeakyReLU(),
        nn.Linear(100, 100),
        nn.LeakyReLU(),
        zm.Linear(100, 2, bias=False),
    )
    classifier = nn.Sequential(
        nn.LeakyReLU(),
        nn.Linear(2, 100),
        nn.LeakyReLU(),
        nn.Linear(100, 4),
    )
    return nn.Sequential(encoder, classifier)


class Encoding(NamedTuple):
    """What the two variance neurons do with fresh points."""

    activations: Tensor  # (points, neurons): one sample for each point
    labels: Tensor  # (points,)
    std: Tensor  # (classes, neurons): over samples, the median over the points of a class
    one_sample: float
    twenty_samples: float


def encode(model: nn.Sequential, points: Tensor, labels: Tensor) -> Encoding:
    """Sample the variance layer, and classify by one and by twenty samples."""
    samples = zm.sample_outputs(model[0], points, num_samples=50)
    std = [samples[:, labels == c].std(0).median(0).values for c in range(len(CENTRES))]
    return Encoding(
        samples[0],
        labels,
        torch.stack(std),
        accuracy(zm.predict_proba(model, points, 1), labels).item(),
        accuracy(zm.predict_proba(model, points, 20), labels).item(),
    )
