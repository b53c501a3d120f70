"""A Laplace approximation of a classifier's last layer: its weights drawn around the trained ones.

Kronecker-factored (Ritter et al., 2018): the Hessian of a dense layer in a softmax classifier is
nearly A ⊗ B, with A = Σ φφᵀ over the inputs of the layer and B the mean of diag(p) − ppᵀ. The
precision of the prior is the one whose predictions are best on validation images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean.uncertainty import negative_log_likelihood

PRECISIONS = tuple(10.0 ** (power / 2) for power in range(-2, 9))


class LastLayer(NamedTuple):
    """What `last_layer_laplace` finds: a source of networks for the inputs of the last layer."""

    networks: zm.States
    precision: float
    """Of the prior."""


def last_layer_laplace(
    layer: nn.Linear,
    inputs: Tensor,
    validation: tuple[Tensor, Tensor],
    *,
    num_draws: int,
    seed: int,
    precisions: Sequence[float] = PRECISIONS,
) -> LastLayer:
    """Draw weights of a trained layer from its Laplace approximation.

    Args:
        layer: The last layer, as trained.
        inputs: What the training images become on the way to it.
        validation: The same for the validation images, and their labels.
    """
    weight = layer.weight.detach().double()
    with torch.no_grad():
        probabilities = layer(inputs).double().softmax(-1)
    inputs = inputs.double()
    mean = probabilities.T @ probabilities / len(inputs)
    of_outputs = torch.linalg.eigh(torch.diag(probabilities.mean(0)) - mean)
    of_inputs = torch.linalg.eigh(inputs.T @ inputs)
    curvature = torch.outer(of_outputs.eigenvalues, of_inputs.eigenvalues).clamp_min(0)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_draws, *weight.shape, generator=generator, dtype=torch.float64)

    def draw(precision: float) -> zm.States:
        scaled = noise / (curvature + precision).sqrt()
        drawn = weight + of_outputs.eigenvectors @ scaled @ of_inputs.eigenvectors.T
        return zm.States(layer, [{"weight": each.to(layer.weight.dtype)} for each in drawn])

    def loss(precision: float) -> float:
        features, labels = validation
        proba = zm.predict_proba(draw(precision), features, 1)
        return negative_log_likelihood(proba, labels)

    best = min(precisions, key=loss)
    return LastLayer(draw(best), best)
