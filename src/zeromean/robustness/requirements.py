"""What attacks are given, checked before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from zeromean.arguments import require_floating, require_numbers, shown


def require_images(images: Any, name: str = "images") -> None:
    """Images in [0, 1], which is where attacks keep them."""
    require_floating(f"An attack ({name})", images)
    if images.dim() < 2 or len(images) == 0:
        raise ValueError(
            f"{name} must be at least one image along dimension 0, got a tensor of shape "
            f"{tuple(images.shape)}."
        )
    low, high = float(images.amin()), float(images.amax())
    if not (low >= 0 and high <= 1):  # Also where they are NaN.
        raise ValueError(
            f"{name} must lie in [0, 1], got values from {low:.4g} to {high:.4g}; attack the "
            "pixels and put the normalization into the model: nn.Sequential(normalize, model)."
        )


def require_labels(labels: Any, images: Tensor, num_classes: int, name: str = "labels") -> None:
    """One class for each image."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of classes, integers, got {shown(labels)}.")
    if labels.shape != images.shape[:1]:
        raise ValueError(
            f"{name} must be one class for each of {len(images)} images, got the shape "
            f"{tuple(labels.shape)}."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"{name} must be from 0 to {num_classes - 1}, as the model has {num_classes} classes, "
            f"got {low} to {high}."
        )


def require_targets(targets: Any, labels: Tensor, images: Tensor, num_classes: int) -> None:
    """Classes to be mistaken for, none of them the true one."""
    require_labels(targets, images, num_classes, "targets")
    same = int((targets == labels).sum())
    if same:
        raise ValueError(
            f"targets must differ from the true classes, but {same} of {len(targets)} are equal to "
            "theirs, and would count as successes of the attack; draw them from the other classes."
        )


def require_epsilon(epsilon: Any) -> float:
    """How far a pixel may go."""
    require_numbers(epsilon=epsilon)
    if not 0 <= epsilon < math.inf:
        raise ValueError(
            "epsilon, the largest change of a pixel in [0, 1], must not be negative, got "
            f"{epsilon}."
        )
    return float(epsilon)
