"""Three networks on scikit-learn's digits: deterministic, with dropout, and a variance network."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean import uncertainty
from zeromean.data.built_in import load_digits

KINDS = ("deterministic", "dropout", "variance")


class Digits(NamedTuple):
    """1,797 images of 8 × 8 pixels in [0, 1], a third of them for testing."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load() -> Digits:
    """The same stratified split whatever the seed, so that runs compare."""
    train, test = load_digits("train"), load_digits("test")
    return Digits(train.images, train.labels, test.images, test.labels)


def build_network(kind: str) -> nn.Sequential:
    """A small LeNet; `kind` says what happens at its big layer, 172,800 of its 185,000 weights."""
    layer = zm.Linear if kind == "variance" else nn.Linear
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 2, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),  # (batch, 64 · 3 · 3)
        nn.Dropout(0.5) if kind == "dropout" else nn.Identity(),
        layer(576, 300, bias=False),
        nn.BatchNorm1d(300),
        nn.ReLU(),
        nn.Linear(300, 10),
    )


class Accuracies(NamedTuple):
    """Percentages of test images, each draw of the noise by itself."""

    one_sample: Tensor  # (draws,)
    mean: float
    twenty_samples: Tensor  # (draws,)
    by_num_samples: Tensor  # (draws, num_samples): averages of 1, 2, 3, … samples


def evaluate(
    model: nn.Module, images: Tensor, labels: Tensor, *, draws: int, num_samples: int
) -> Accuracies:
    """Classify by one sample of the weights, by their means, and by averages of samples."""
    one = [accuracy(zm.predict_proba(model, images, 1), labels) for _ in range(draws)]
    mean = accuracy(zm.predict_proba(model, images, 1, sampler=zm.mean), labels)
    twenty = [accuracy(zm.predict_proba(model, images, 20), labels) for _ in range(draws)]
    growing = []
    for _ in range(draws):
        samples = zm.sample_outputs(model, images, num_samples).softmax(-1)
        growing.append(accuracy(samples.cumsum(0), labels))
    return Accuracies(torch.stack(one), mean.item(), torch.stack(twenty), torch.stack(growing))


def accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    """Per cent of examples whose highest score `(…, examples, classes)` is at their label."""
    return 100 * (scores.argmax(-1) == labels).float().mean(-1)


def foreign_images(images: Tensor) -> dict[str, Tensor]:
    """Images that a network trained on digits has never seen the like of."""
    return {
        "rotated by 90°": images.rot90(1, (2, 3)),
        "inverted": 1 - images,
        "noise": torch.rand_like(images),
    }


def separation(familiar: Tensor, foreign: Tensor) -> float:
    """AUROC: how often an uncertainty is higher on a foreign image than on a familiar one."""
    return uncertainty.auroc(familiar, foreign)
