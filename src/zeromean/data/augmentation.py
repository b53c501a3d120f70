"""Random changes of images that leave their class alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.arguments import require_integer, shown


def crop_and_flip(
    images: Tensor, padding: int = 4, generator: torch.Generator | None = None
) -> Tensor:
    """Shift each image by up to `padding` pixels (zeros come in) and mirror it half of the time.

    Args:
        images: `(N, C, H, W)`.
        padding: Zeros put around an image before a window of its own size is cut out.
        generator: Where the random numbers come from; None for torch's global generator.
    """
    if not isinstance(images, Tensor):
        raise TypeError(f"crop_and_flip needs a tensor of images, got {shown(images)}.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {shown(generator)}; use "
            "torch.Generator().manual_seed(0)."
        )
    if images.dim() != 4:
        raise ValueError(
            f"crop_and_flip needs images of shape (N, C, H, W), got {tuple(images.shape)}."
        )
    padding = require_integer("padding", padding, at_least=0)
    num_images, _, height, width = images.shape
    source = images.device if generator is None else generator.device

    def draw(choices: int) -> Tensor:
        return torch.randint(choices, (num_images, 1), generator=generator, device=source)

    rows = draw(2 * padding + 1) + torch.arange(height, device=source)  # (N, H), in padded pixels
    columns = torch.arange(width, device=source)
    mirrored = torch.where(draw(2).bool(), columns.flip(0), columns)
    columns = draw(2 * padding + 1) + mirrored  # (N, W)

    padded = F.pad(images, (padding,) * 4)
    pixels = rows[:, :, None] * padded.shape[3] + columns[:, None, :]  # (N, H, W)
    pixels = pixels.view(num_images, 1, -1).expand(-1, images.shape[1], -1)
    return padded.flatten(2).gather(2, pixels.to(images.device)).view_as(images)
