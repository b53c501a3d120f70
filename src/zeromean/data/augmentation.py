"""Random changes of images that leave their class alone."""

from __future__ import annotations

from dataclasses import dataclass

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
    num_images = len(images)
    source = images.device if generator is None else generator.device

    def draw(choices: int) -> Tensor:
        return torch.randint(choices, (num_images, 1), generator=generator, device=source)

    down, mirrored, right = draw(2 * padding + 1), draw(2).bool(), draw(2 * padding + 1)
    return _cut_out(images, padding, "constant", mirrored, down, right)


@dataclass(frozen=True)
class ShiftAndAlternate:
    """Shift each image by up to `padding` pixels, and mirror it in every other epoch.

    The first time an image is mirrored or not by chance, from then on by turns (Jordan 2024): in
    any two epochs a network sees both of it, where chance would show one of them twice half of the
    time. The pixels that come in are those of the image, reflected at its edge.

    Args:
        padding: The farthest shift.
        seed: Of the first mirroring.
    """

    padding: int = 2
    seed: int = 0

    def augment(
        self, images: Tensor, index: Tensor, epoch: int, *, generator: torch.Generator
    ) -> Tensor:
        mirrored = (_coin(index, self.seed) + epoch) % 2 == 1
        shifts = torch.randint(2 * self.padding + 1, (2, len(images), 1), generator=generator)
        return _cut_out(images, self.padding, "reflect", mirrored.unsqueeze(1), *shifts)


def _coin(index: Tensor, seed: int) -> Tensor:
    """0 or 1 for every number, always the same for the same one."""
    mixed = (index.cpu().to(torch.int64) + 1 + seed * 0x9E3779B9) * 0x45D9F3B
    mixed = (mixed ^ (mixed >> 16)) * 0x45D9F3B
    return (mixed ^ (mixed >> 16)) >> 7 & 1


def _cut_out(
    images: Tensor, padding: int, mode: str, mirrored: Tensor, down: Tensor, right: Tensor
) -> Tensor:
    """Windows of the images' own size out of the padded images; what varies by image is (N, 1)."""
    height, width = images.shape[2:]
    source = mirrored.device
    rows = down + torch.arange(height, device=source)  # (N, H), in padded pixels
    columns = torch.arange(width, device=source)
    columns = right + torch.where(mirrored, columns.flip(0), columns)  # (N, W)
    padded = F.pad(images, (padding,) * 4, mode=mode)
    pixels = rows[:, :, None] * padded.shape[3] + columns[:, None, :]  # (N, H, W)
    pixels = pixels.view(len(images), 1, -1).expand(-1, images.shape[1], -1)
    return padded.flatten(2).gather(2, pixels.to(images.device)).view_as(images)
