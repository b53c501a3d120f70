"""A set of labelled images, whole in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeromean.arguments import require_integer, shown


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
        for name in ("images", "labels"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise TypeError(
                    f"{name} must be a tensor with a row for each image, got {shown(value)}; use "
                    "torch.as_tensor."
                )
        num_classes = require_integer("num_classes", self.num_classes, at_least=0)
        object.__setattr__(self, "num_classes", num_classes)
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
        try:
            index = torch.as_tensor(indices, device=self.labels.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"subset needs a list of indices, got {shown(indices)}.") from error
        if index.dim() != 1:
            raise TypeError(f"subset needs a list of indices, got {shown(indices)}.")
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
        outside = (index < 0) | (index >= len(self))
        if outside.any():
            raise ValueError(
                f"subset needs indices from 0 to {len(self) - 1}, got {int(index[outside][0])}."
            )
        return ImageSet(
            self.images.index_select(0, index), self.labels.index_select(0, index), self.num_classes
        )
