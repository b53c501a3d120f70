"""The mini-batches of an epoch, in an order that depends on nothing but the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from zeromean.arguments import require_integer, shown
from zeromean.data.image_set import ImageSet


class Augmentation(Protocol):
    """What `Batches` asks of an augmentation; `crop_and_flip` is one."""

    def __call__(self, images: Tensor, /, *, generator: torch.Generator) -> Tensor: ...


@runtime_checkable
class EpochAugmentation(Protocol):
    """One that must know which images it gets, and in which epoch; `ShiftAndAlternate` is one."""

    def augment(
        self, images: Tensor, index: Tensor, epoch: int, *, generator: torch.Generator
    ) -> Tensor: ...


class Batches:
    """An epoch's mini-batches `(images, labels)`, indexed out of the tensors, without workers.

    Order and augmentation are pure functions of `(seed, epoch)`, so that a resumed run sees what
    an uninterrupted one sees; torch's global generator is not touched. Every iteration gives the
    epoch of the last `set_epoch`, at first epoch 0.

    Args:
        data: The set.
        batch_size: Images a batch; the last batch has what is left.
        seed: Seed of the order and of the augmentation.
        shuffle: False for the order of the set.
        drop_last: Leave out a last batch that is not full.
        augment: Called as `augment(images, generator=...)` on every batch; or an
            `EpochAugmentation`, whose method is called with the images' numbers and the epoch too.
        rank: Which of `num_ranks` processes this is: each gets its share of every batch. Shares are
            of one size; where a last batch cannot be divided, some of its images come twice.
        num_ranks: Processes that train together.
    """

    def __init__(
        self,
        data: ImageSet,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        augment: Augmentation | EpochAugmentation | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ):
        if not isinstance(data, ImageSet):
            raise TypeError(
                f"data must be an ImageSet, got {shown(data)}; build one: "
                "ImageSet(images, labels, num_classes)."
            )
        by_epoch = isinstance(augment, EpochAugmentation)
        if augment is not None and not callable(augment) and not by_epoch:
            raise TypeError(f"augment must be a function, got {shown(augment)}.")
        self.data = data
        self.batch_size = require_integer("batch_size", batch_size, at_least=1)
        self.seed = require_integer("seed", seed, at_least=0)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.augment = augment
        self.num_ranks = require_integer("num_ranks", num_ranks, at_least=1)
        self.rank = require_integer("rank", rank, at_least=0)
        if self.rank >= self.num_ranks or self.batch_size % self.num_ranks:
            raise ValueError(
                f"Batches of {self.batch_size} must be divided evenly by num_ranks and rank be "
                f"smaller than that, got rank {self.rank} of {self.num_ranks}."
            )
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.epoch = require_integer("epoch", epoch, at_least=0)

    def __len__(self) -> int:
        full, rest = divmod(len(self.data), self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, images, labels = self.epoch, self.data.images, self.data.labels
        # The order is stream 0 of an epoch, the augmentation of its first batch stream 1.
        order = torch.arange(len(self.data))
        if self.shuffle:
            order = torch.randperm(len(order), generator=_generator(self.seed, epoch, 0))
        order = order.to(labels.device)
        for batch in range(len(self)):
            index = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            index = share_of(index, self.rank, self.num_ranks)
            chosen = images.index_select(0, index)
            if self.augment is not None:
                # Nobody else's: every rank augments its own images.
                others = (self.rank,) if self.rank else ()
                generator = _generator(self.seed, epoch, batch + 1, *others)
                if isinstance(self.augment, EpochAugmentation):
                    chosen = self.augment.augment(chosen, index, epoch, generator=generator)
                else:
                    chosen = self.augment(chosen, generator=generator)
            yield chosen, labels.index_select(0, index)


def share_of(rows: Tensor, rank: int, num_ranks: int) -> Tensor:
    """Every `num_ranks`-th row; the first ones come twice where shares would differ in size."""
    if num_ranks == 1 or len(rows) == 0:
        return rows
    size = -(-len(rows) // num_ranks) * num_ranks
    return rows[torch.arange(rank, size, num_ranks, device=rows.device) % len(rows)]


def _generator(*numbers: int) -> torch.Generator:
    # SeedSequence mixes: neighbouring seeds and epochs do not give related generators.
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
