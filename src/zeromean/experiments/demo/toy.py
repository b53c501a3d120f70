"""The toy problem of Figure 1: two neurons whose variances alone tell four classes apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean.data.built_in import TOY_CENTRES
from zeromean.experiments.demo.digits import accuracy


class Encoding(NamedTuple):
    """What the two variance neurons do with fresh points."""

    activations: Tensor  # (points, neurons): one sample for each point
    labels: Tensor  # (points,)
    std: Tensor  # (classes, neurons): over samples, the median over the points of a class
    one_sample: float
    twenty_samples: float


def encode(model: nn.Sequential, points: Tensor, labels: Tensor) -> Encoding:
    """Sample the variance layer, and classify by one and by twenty samples."""
    samples = zm.sample_outputs(model.get_submodule("encoder"), points, num_samples=50)
    std = [samples[:, labels == c].std(0).median(0).values for c in range(len(TOY_CENTRES))]
    return Encoding(
        samples[0],
        labels,
        torch.stack(std),
        accuracy(zm.predict_proba(model, points, 1), labels).item(),
        accuracy(zm.predict_proba(model, points, 20), labels).item(),
    )
