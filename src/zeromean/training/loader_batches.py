"""The batches of a loader, in an order that a resumed run finds again, shared or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zeromean.data.batches import share_of
from zeromean.training.randomness import derived_seed


class LoaderBatches:
    """The batches of a loader, in an order that depends on nothing but the seed and the epoch.

    Args:
        loader: A DataLoader, or anything else that gives the batches of an epoch when it is
            iterated over.
        steps: Batches of an epoch.
        seed: Together with the epoch it seeds the loader's generators, or, where it has none,
            torch's global one while the loader begins; that one is put back.
        rank: Each of `num_ranks` processes gets its share of every batch.
    """

    def __init__(self, loader: Any, steps: int, *, seed: int, rank: int = 0, num_ranks: int = 1):
        self.steps = steps
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.epoch = 0
        self.split_here = num_ranks > 1 and not is_split(loader)
        if self.split_here and _has_indices(loader):
            loader = _with_share(loader, rank, num_ranks)
            self.split_here = False
        self.loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        seed = derived_seed(self.seed, 3, self.epoch)
        for part in samplers_of(self.loader):
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(seed)
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        with torch.random.fork_rng(devices=[]):
            # Samplers draw the order of an epoch, or a seed for it, when they are first asked.
            torch.default_generator.manual_seed(seed)
            iterator = iter(self.loader)
            batch = next(iterator, None)
        for step in range(self.steps):
            if batch is None:
                raise ValueError(
                    f"The training data ended after {step} of the {self.steps} batches of epoch "
                    f"{self.epoch + 1}; say how many there are by steps_per_epoch=."
                )
            yield self._share(batch)
            if step + 1 < self.steps:
                batch = next(iterator, None)

    def _share(self, batch: Any) -> Any:
        if not self.split_here:
            return batch
        lengths = [len(t) for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
        if not lengths:
            raise TypeError("A batch must hold tensors with a row for each example.")
        return tree_map_only(
            Tensor,
            lambda t: (
                share_of(t, self.rank, self.num_ranks) if t.dim() and len(t) == lengths[0] else t
            ),
            batch,
        )


class _Share:
    """A batch sampler that gives one process its part of every batch of another."""

    def __init__(self, sampler: Any, rank: int, num_ranks: int):
        self.sampler = sampler
        self.rank = rank
        self.num_ranks = num_ranks

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            batch = list(batch)
            share = share_of(torch.arange(len(batch)), self.rank, self.num_ranks)
            yield [batch[place] for place in share.tolist()]


def _with_share(loader: DataLoader[Any], rank: int, num_ranks: int) -> DataLoader[Any]:
    options: dict[str, Any] = {}
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        options["multiprocessing_context"] = loader.multiprocessing_context
    sampler: Any = _Share(loader.batch_sampler, rank, num_ranks)
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **options,
    )


def _has_indices(loader: Any) -> bool:
    """Whether the batches can be divided before their examples are read."""
    return (
        type(loader) is DataLoader
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def is_split(loader: Any) -> bool:
    """Whether the loader gives each process examples of its own already."""
    return any(isinstance(part, DistributedSampler) for part in samplers_of(loader))


def samplers_of(loader: Any) -> list[Any]:
    """The loader, its batch sampler and sampler, and those that they are built of."""
    found = [loader]
    for part in found:
        for name in ("batch_sampler", "sampler"):
            inner = getattr(part, name, None)
            if inner is not None and all(inner is not known for known in found):
                found.append(inner)
    return found


def why_inexact(loader: Any) -> str | None:
    if not isinstance(loader, DataLoader):
        return f"the data ({type(loader).__name__}) may have a state that no checkpoint holds"
    if isinstance(loader.dataset, IterableDataset):
        return "an iterable data set may have a state that no checkpoint holds"
    if loader.persistent_workers:
        return "persistent workers keep their random state over epochs"
    ours = ("torch.utils.data", "zeromean.")
    for part in samplers_of(loader)[1:]:
        if not type(part).__module__.startswith(ours):
            return f"the sampler {type(part).__name__} may have a state that no checkpoint holds"
    return None
