"""From a name to a data set in memory, by way of the data folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from zeromean.arguments import shown
from zeromean.data.built_in import BUILT_IN
from zeromean.data.catalogue import CATALOGUE, DataFile, FileSet
from zeromean.data.files import Contents, read_checked
from zeromean.data.image_set import ImageSet
from zeromean.data.transfer import absent, provide
from zeromean.extras import how_to_install

NAMES = ("mnist", "fashion-mnist", "notmnist", "cifar10", "cifar100", "digits", "toy")
"""The data sets that `load` knows."""
FOLDER_VARIABLE = "ZEROMEAN_DATA"
# Choices are made on these, so that the test set is read once. A tenth of a smaller set.
VALIDATION_SIZE = 5000


class FileStatus(NamedTuple):
    """Where a file belongs, and "ok", "missing" or "damaged: " with the reason."""

    path: Path
    state: str


def load(name: str, split: str = "train", *, data_dir: Path | str | None = None) -> ImageSet:
    """A data set, whole in memory: pixels in [0, 1], float32.

    Files that are missing are downloaded; files that are there are checked by content and never
    overwritten. `digits` and `toy` are built in; CIFAR-100 has its 100 fine classes.

    Args:
        name: One of `NAMES`.
        split: "train" or "test"; or, of the training set, "validation" (its last 5,000 examples, of
            smaller sets the last tenth) and "rest" (all the others), to choose settings with.
        data_dir: The data folder; see `data_folder`.
    """
    if isinstance(split, str) and split in ("validation", "rest"):
        return _part_of_training_set(load(name, "train", data_dir=data_dir), split)
    files = _files(name, split)
    if name in BUILT_IN:
        return BUILT_IN[name](split)
    folder = data_folder(data_dir)
    _bring(name, files, folder)
    return _assemble(CATALOGUE[name], [_read(file, folder / file.path) for file in files])


def _part_of_training_set(train: ImageSet, split: str) -> ImageSet:
    border = len(train) - min(VALIDATION_SIZE, len(train) // 10)
    chosen = slice(border, None) if split == "validation" else slice(border)
    return ImageSet(train.images[chosen], train.labels[chosen], train.num_classes)


def verify(name: str, data_dir: Path | str | None = None) -> list[FileStatus]:
    """The state of every file of a data set; none for a set that is built in. Downloads nothing."""
    files = _all_files(name)
    return [_status(file, data_folder(data_dir) / file.path) for file in files]


def download(name: str, data_dir: Path | str | None = None) -> list[FileStatus]:
    """Download the files of a data set that are missing, and verify all of them."""
    files = _all_files(name)
    if files:
        _bring(name, files, data_folder(data_dir))
    return verify(name, data_dir)


def how_to_provide(name: str, data_dir: Path | str | None = None) -> str:
    """Which files to put where, for those that are missing; empty if none is."""
    files = _all_files(name)
    return _instructions(files, data_folder(data_dir)) if files else ""


def data_folder(data_dir: Path | str | None = None) -> Path:
    """The argument, else the environment variable ZEROMEAN_DATA, else the platform's cache."""
    if not isinstance(data_dir, str | os.PathLike | None):
        raise TypeError(f"data_dir must be the path of a folder, got {shown(data_dir)}.")
    chosen = data_dir or os.environ.get(FOLDER_VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise ValueError(f"There is no user for the data folder {chosen}.") from None
    try:
        import pooch
    except ImportError as error:
        raise ImportError(
            how_to_install(
                "Without a data folder (--data-dir, or the environment variable "
                f"{FOLDER_VARIABLE}) pooch is needed to find one",
                "experiments",
            )
        ) from error
    return Path(pooch.os_cache("zeromean")).expanduser()


def _all_files(name: str) -> tuple[DataFile, ...]:
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f"There is no data set {shown(name)}; there are {', '.join(NAMES)}.")
    return () if name in BUILT_IN else CATALOGUE[name].files


def _files(name: str, split: str) -> tuple[DataFile, ...]:
    """The files of a split, once the name and the split are known to exist."""
    _all_files(name)
    if not isinstance(split, str) or split not in ("train", "test"):
        raise ValueError(
            f'split must be "train", "validation", "rest" or "test", got {shown(split)}.'
        )
    if name in BUILT_IN:
        return ()
    splits = CATALOGUE[name].splits
    if split not in splits:
        raise ValueError(f"{name} has no {split} split, only {', '.join(splits)}.")
    return splits[split]


def _bring(name: str, files: Sequence[DataFile], folder: Path) -> None:
    try:
        provide(files, folder)
    except (OSError, ImportError) as error:
        raise FileNotFoundError(_vain(name, files, folder, error)) from error
    except ValueError as error:
        raise ValueError(_vain(name, files, folder, error)) from error


def _vain(name: str, files: Sequence[DataFile], folder: Path, error: Exception) -> str:
    return (
        f"{name} is not complete in {folder}, and the download of what is missing failed: {error}\n"
        + _instructions(files, folder)
    )


def _instructions(files: Sequence[DataFile], folder: Path) -> str:
    missing = absent(files, folder)
    if not missing:
        return ""
    lines = ["Put each file where the arrow points:"]
    for source in dict.fromkeys(file.source for file in missing):
        members = [file.path for file in missing if file.source == source and file.in_archive]
        lines.append(f"  {source.urls[0]} -> {folder / source.path}")
        if members:
            lines.append(f"    (or unpacked: {', '.join(str(folder / path) for path in members)})")
    lines.append(f"or name a folder that has them, by --data-dir or {FOLDER_VARIABLE}.")
    return "\n".join(lines)


def _read(file: DataFile, path: Path) -> Contents:
    try:
        return read_checked(file, path)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}. Delete it to have it downloaded, or put the official "
            f"file ({file.source.urls[0]}) in its place."
        ) from error


def _status(file: DataFile, path: Path) -> FileStatus:
    if not os.path.exists(path):
        return FileStatus(path, "missing")
    try:
        read_checked(file, path)
    except ValueError as error:
        return FileStatus(path, f"damaged: {error}")
    return FileStatus(path, "ok")


def _assemble(files: FileSet, parts: Sequence[Contents]) -> ImageSet:
    labels = np.concatenate([part.labels for part in parts if part.labels is not None])
    images = torch.empty(len(labels), *files.image_shape)
    start = 0
    for part in parts:
        if part.images is not None:
            stop = start + len(part.images)
            images.numpy()[start:stop] = part.images
            start = stop
    return ImageSet(images.div_(255), torch.from_numpy(labels.astype(np.int64)), files.num_classes)
