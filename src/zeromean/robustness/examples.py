"""Images that an attack has made, and what it knew and spent."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeromean.arguments import require_seed
from zeromean.robustness.requirements import require_epsilon, require_images


@dataclass(frozen=True)
class AdversarialExamples:
    """What an attack returns. Whether they fool anybody, `judge` finds out.

    Attributes:
        images: In the order of the images that were attacked.
        attack: Its name.
        epsilon: How far a pixel may have gone; None: as far as the steps took it.
        num_samples: Draws of the noise that each gradient, or query, averaged over.
        num_steps: Gradients, or queries.
        targets: The classes that it aimed at, if any.
        success_by_step: Of the paper's attack, the part of all images that the network takes for
            their targets before the first step and after each one, with noise that the steps so
            far have not seen.
    """

    images: Tensor
    attack: str
    epsilon: float | None
    num_samples: int
    num_steps: int
    targets: Tensor | None = None
    success_by_step: Tensor | None = field(default=None, repr=False)


def random_noise(images: Tensor, epsilon: float, *, seed: int = 0) -> AdversarialExamples:
    """Images with uniform noise in ±epsilon: what a perturbation does that knows nothing."""
    require_images(images)
    epsilon = require_epsilon(epsilon)
    noisy = within(images + noise_in_ball(images, epsilon, seed), images, epsilon)
    return AdversarialExamples(noisy, "random noise", epsilon, num_samples=0, num_steps=0)


def noise_in_ball(images: Tensor, epsilon: float, seed: int) -> Tensor:
    """Uniform noise in ±epsilon, without touching the global generator."""
    generator = torch.Generator().manual_seed(require_seed(seed))
    uniform = torch.rand(images.shape, generator=generator, dtype=images.dtype)
    return (epsilon * (2 * uniform - 1)).to(images.device)


def within(changed: Tensor, images: Tensor, epsilon: float | None) -> Tensor:
    """The nearest images in [0, 1] that no pixel has left by more than epsilon."""
    if epsilon is not None:
        changed = torch.minimum(torch.maximum(changed, images - epsilon), images + epsilon)
    return changed.clamp(0, 1)
