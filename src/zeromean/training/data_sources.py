"""What `fit` trains on: tensors, data sets, loaders, data modules, as batches of an epoch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from zeromean.arguments import require_integer, shown
from zeromean.data.batches import Batches
from zeromean.data.image_set import ImageSet
from zeromean.training.loader_batches import LoaderBatches, is_split, why_inexact

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from zeromean.data.batches import Augmentation, EpochAugmentation
    from zeromean.training.config import TrainingConfig

# Anything that gives (inputs, targets), or mappings with the targets in them.
Data = ImageSet | tuple[Tensor, Tensor] | Dataset[Any] | Iterable[Any]
# Rows of an evaluation at once, where the data have no batches of their own.
_EVALUATED_AT_ONCE = 1000


class EpochBatches(Protocol):
    """The batches of one process, for every epoch."""

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class DataSource:
    """The training data as one process of several sees them."""

    batches: EpochBatches
    num_data: int
    """Examples in the whole training set, over all processes."""
    description: str
    """What has to be the same for a run to be resumed."""
    inexact: str | None = None
    """Why an interrupted run may end otherwise than one that was not."""


def data_source(
    data: Data,
    config: TrainingConfig,
    *,
    num_data: int | None = None,
    steps_per_epoch: int | None = None,
    augment: Augmentation | EpochAugmentation | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> DataSource:
    """The batches of `data` for one process, however they are given."""
    if num_data is not None:
        num_data = require_integer("num_data", num_data, at_least=1)
    if steps_per_epoch is not None:
        steps_per_epoch = require_integer("steps_per_epoch", steps_per_epoch, at_least=1)
    tensors = as_image_set(data)
    if tensors is not None:
        if steps_per_epoch is not None:
            raise ValueError(
                "steps_per_epoch is for loaders without a length; an epoch of tensors is all of "
                "them."
            )
        return _of_tensors(tensors, config, num_data, augment, rank, num_ranks)
    if augment is not None:
        raise ValueError(
            "augment is for tensors; a data set or a loader augments its examples itself."
        )
    loader = _as_loader(data, config)
    return _of_loader(loader, config, num_data, steps_per_epoch, rank, num_ranks)


def as_image_set(data: Any) -> ImageSet | None:
    """Data that are tensors, whole in memory; None for other kinds."""
    if isinstance(data, ImageSet):
        return data
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if not isinstance(data, tuple) or len(data) != 2 or not isinstance(data[0], Tensor):
        return None
    inputs, targets = data
    if not isinstance(targets, Tensor) or targets.dim() == 0 or inputs.dim() == 0:
        raise TypeError(
            "A pair of data must be two tensors with a row for each example, got targets that are "
            f"{shown(targets)}; use torch.as_tensor."
        )
    if len(inputs) != len(targets):
        raise ValueError(
            f"There must be a target for each example, got {len(inputs)} examples and "
            f"{len(targets)} targets."
        )
    return ImageSet(inputs, targets, num_classes=0)


def require_data(name: str, data: Any) -> None:
    """Refuse what cannot be gone through again in every epoch."""
    if isinstance(data, (ImageSet, Dataset, DataLoader)) or as_image_set(data) is not None:
        return
    again = isinstance(data, Iterable) and not isinstance(data, (Iterator, Tensor, str, Mapping))
    if again and not isinstance(data, tuple):
        return
    hint = "; a generator gives one epoch only" if isinstance(data, Iterator) else ""
    raise TypeError(
        f"{name} must be a pair of tensors (inputs, targets), a zeromean.data.ImageSet, a torch "
        f"Dataset or DataLoader, or a LightningDataModule, got {shown(data)}{hint}."
    )


def evaluation_batches(data: Any) -> Iterable[Any]:
    """Batches of a set that is only looked at."""
    tensors = as_image_set(data)
    if tensors is not None:
        pairs = tensors.images, tensors.labels
        return list(zip(*(each.split(_EVALUATED_AT_ONCE) for each in pairs), strict=True))
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=_EVALUATED_AT_ONCE)
    return data


def describe_data(data: Data, num_data: int | None = None) -> str:
    """What tells one set from another, as far as that can be seen without reading it all."""
    tensors = as_image_set(data)
    if tensors is not None:
        what = "images" if isinstance(data, ImageSet) else "examples"
        content = checksum(tensors.images, tensors.labels)
        # A rank's share of them all is not another run.
        return f"{len(tensors)} {what}, checksum {content}"
    dataset = getattr(data, "dataset", data)
    parts = [f"{type(data).__name__} of {type(dataset).__name__}"]
    if num_data is not None:
        parts.append(f"{num_data} examples")
    if isinstance(dataset, TensorDataset):
        parts.append(f"checksum {checksum(*dataset.tensors)}")
    if getattr(data, "batch_size", None) is not None:
        parts.append(f"batches of {data.batch_size}")  # pyright: ignore
    return ", ".join(parts)


def is_module(data: Any) -> bool:
    import lightning.pytorch as pl

    return isinstance(data, pl.LightningDataModule)


def from_module(module: pl.LightningDataModule, prepare: Any) -> tuple[Any, Any]:
    """The loaders of a data module, the one for validation None where it has none.

    Args:
        prepare: Calls a function in one process and lets the others wait for it.
    """
    from lightning.pytorch.utilities.model_helpers import is_overridden

    prepare(module.prepare_data)
    module.setup("fit")
    validation = module.val_dataloader() if is_overridden("val_dataloader", module) else None
    return module.train_dataloader(), validation


def _of_tensors(
    data: ImageSet,
    config: TrainingConfig,
    num_data: int | None,
    augment: Augmentation | EpochAugmentation | None,
    rank: int,
    num_ranks: int,
) -> DataSource:
    _require_divisible("batch_size", config.batch_size, num_ranks)
    rest = len(data) % config.batch_size
    batches = Batches(
        data,
        config.batch_size,
        seed=config.seed,
        # BatchNorm can make nothing of a single image. Which is left over depends on the epoch.
        drop_last=0 < rest <= num_ranks < config.batch_size and rest < len(data),
        augment=augment,
        rank=rank,
        num_ranks=num_ranks,
    )
    return DataSource(batches, len(data) if num_data is None else num_data, "")


def _as_loader(data: Any, config: TrainingConfig) -> Any:
    """A loader of a data set; what is one already is left alone."""
    if not isinstance(data, Dataset):
        return data
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=config.batch_size)
    rest = len(data) % config.batch_size  # pyright: ignore
    alone = rest == 1 < len(data)  # pyright: ignore
    return DataLoader(data, batch_size=config.batch_size, shuffle=True, drop_last=alone)


def _of_loader(
    loader: Any,
    config: TrainingConfig,
    num_data: int | None,
    steps_per_epoch: int | None,
    rank: int,
    num_ranks: int,
) -> DataSource:
    steps = steps_per_epoch or _length(loader)
    count = num_data or _num_examples(loader)
    missing = [
        name for name, value in (("steps_per_epoch", steps), ("num_data", count)) if value is None
    ]
    if missing:
        raise ValueError(
            f"The training data ({type(loader).__name__}) have no length; say "
            f"{' and '.join(f'{name}=' for name in missing)}: steps_per_epoch is the number of "
            "batches of an epoch, num_data that of the examples that there are."
        )
    assert steps is not None
    assert count is not None
    if steps == 0 or count == 0:
        raise ValueError("The training set is empty.")
    size = getattr(loader, "batch_size", None)
    if size is not None and not is_split(loader):
        _require_divisible("The loader's batch_size", size, num_ranks)
    description = describe_data(loader, count)
    if steps_per_epoch is not None:
        description += f", {steps_per_epoch} batches an epoch"
    batches = LoaderBatches(loader, steps, seed=config.seed, rank=rank, num_ranks=num_ranks)
    return DataSource(batches, count, description, why_inexact(loader))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _num_examples(loader: Any) -> int | None:
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):
        return len(sampler)
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return None
    return _length(dataset)


def _require_divisible(name: str, size: int, num_ranks: int) -> None:
    if size % num_ranks:
        raise ValueError(
            f"{name} counts the examples of all processes and must be a multiple of their number, "
            f"got {size} for {num_ranks} processes."
        )


def checksum(*tensors: Tensor) -> str:
    """What tells the contents of tensors apart."""
    value = 0
    for tensor in tensors:
        content: Any = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()  # As bytes.
        value = zlib.crc32(content, value)
    return f"{value:08x}"
