"""A set of labelled images, whole in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and their classes.

    Attributes:
        images: `(N, C, H, W)`, float32 in [0, 1]. The toy problem has points, `(N, 2)`, instead.
        labels: `(N,)`, int64; other integers become so.
        num_classes: How many classes there are, also where a subset lacks some.
    """

    images: Tensor
    labels: Tensor
    num_classes: int

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"An ImageSet needs a label for each image, got {len(self.images)} images and "
                f"{len(self.labels)} labels."
            )
        if not self.labels.is_floating_point():
            # Losses want int64, whatever integers a file holds.
            object.__setattr__(self, "labels", self.labels.long())

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set on another device."""
        return ImageSet(self.images.to(device), self.labels.to(device), self.num_classes)

    def subset(self, indices: Tensor | Sequence[int]) -> ImageSet:
        """A copy of the images with these indices, in this order; or of those that are True."""
        index = torch.as_tensor(indices, device=self.labels.device)
        if index.dtype == torch.bool:
            if index.shape != self.labels.shape:
                raise ValueError(
                    f"subset needs True or False for each of {len(self)} images, got a tensor of "
                    f"shape {tuple(index.shape)}."
                )
            index = index.nonzero().flatten()
        elif index.is_floating_point() and len(index):
            raise TypeError(f"subset needs indices, got numbers of type {index.dtype}.")
        index = index.long()
        return ImageSet(
            self.images.index_select(0, index), self.labels.index_select(0, index), self.num_classes
        )
