"""Reading a file in MNIST's IDX or CIFAR's binary format, and refusing one that is damaged.

The sentences of the errors say what is wrong with the file; `loading.py` says which file it is.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from zeromean.data.catalogue import CATALOGUE, DataFile

# The first four bytes of an IDX file: unsigned bytes in three dimensions, or in one.
_MAGIC = {"images": 2051, "labels": 2049}
_IDX_SHAPE = (28, 28)
_CIFAR_SHAPE = (3, 32, 32)


class Contents(NamedTuple):
    """What a file holds, as unsigned bytes; an IDX file has one of the two."""

    images: np.ndarray | None
    labels: np.ndarray | None


def read_checked(file: DataFile, path: Path) -> Contents:
    """The contents of the file at `path`, which must be those of `file`; ValueError if not."""
    try:
        # By the description's name: a file may be checked before it has its own.
        opened = gzip.open(path) if file.path.endswith(".gz") else path.open("rb")
        with opened as stream:
            data = _read(file, cast(BinaryIO, stream))
    except EOFError:
        raise ValueError("it is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"it is not a sound gzip file ({error})") from None
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror or error})") from None
    contents = _split(file, data)
    if contents.labels is not None:
        _check_labels(file, contents.labels)
    _check_digest(file, hashlib.sha256(data).hexdigest())
    return contents


def contents_size(file: DataFile) -> int:
    """How many bytes belong into a file, before gzip."""
    return _header_size(file) + prod(_shape(file))


def _shape(file: DataFile) -> tuple[int, ...]:
    if file.holds == "records":
        return file.count, file.label_bytes + prod(_CIFAR_SHAPE)
    return (file.count, *_IDX_SHAPE) if file.holds == "images" else (file.count,)


def _header_size(file: DataFile) -> int:
    return 0 if file.holds == "records" else 4 * (1 + len(_shape(file)))


def _read(file: DataFile, stream: BinaryIO) -> bytes:
    """The whole file, refused as early as its header or its size shows that it is another."""
    shape, header = _shape(file), stream.read(_header_size(file))
    if file.holds != "records":
        _check_header(file, np.frombuffer(header[: len(header) // 4 * 4], ">u4").tolist(), shape)
    size = prod(shape)
    body = stream.read(size)
    if len(body) < size:
        raise ValueError(f"it is cut short: {len(body):,} bytes of data instead of {size:,}")
    # Also makes gzip read, and check, the checksum at the end.
    if stream.read(1):
        raise ValueError(f"it is longer than the {size:,} bytes of data that belong there")
    return header + body


def _check_header(file: DataFile, header: list[int], shape: tuple[int, ...]) -> None:
    magic = _MAGIC[file.holds]
    if not header:
        raise ValueError("it is cut short: there is nothing in it")
    if header[0] != magic:
        other = next((kind for kind, number in _MAGIC.items() if number == header[0]), None)
        if other is not None:
            raise ValueError(
                f"it holds {other} where {file.holds} belong; the two files may be exchanged"
            )
        raise ValueError(f"it does not begin like an IDX file of {file.holds}")
    if len(header) <= len(shape):
        raise ValueError("it is cut short within its header")
    if header[1] != file.count:
        raise ValueError(
            f"it holds {header[1]:,} {file.holds} where {file.count:,} belong; the training "
            "and the test files may be exchanged"
        )
    if tuple(header[2:]) != shape[1:]:
        found, wanted = (" × ".join(map(str, sizes)) for sizes in (header[2:], shape[1:]))
        raise ValueError(f"its images are {found} where {wanted} belong")


def _split(file: DataFile, data: bytes) -> Contents:
    values = np.frombuffer(data, np.uint8)
    if file.holds == "images":
        return Contents(values[16:].reshape(-1, 1, *_IDX_SHAPE), None)
    if file.holds == "labels":
        return Contents(None, values[8:])
    records = values.reshape(file.count, -1)
    images = records[:, file.label_bytes :].reshape(-1, *_CIFAR_SHAPE)
    return Contents(images, records[:, file.label_bytes - 1])


def _check_labels(file: DataFile, labels: np.ndarray) -> None:
    counts = np.bincount(labels, minlength=file.num_classes)
    if len(counts) > file.num_classes:
        raise ValueError(f"it has a label {len(counts) - 1} where only {file.num_classes} exist")
    if file.per_class is not None and (counts != file.per_class).any():
        raise ValueError(
            f"it holds {counts.min():,} to {counts.max():,} examples a class where "
            f"{file.per_class:,} belong"
        )


def _check_digest(file: DataFile, digest: str) -> None:
    if digest == file.sha256:
        return
    every = (known for files in CATALOGUE.values() for known in files.files)
    twin = next((known.path for known in every if known.sha256 == digest), None)
    if twin is not None:
        raise ValueError(f"it holds the contents of {twin}; the two may be exchanged")
    if file.sha256 is not None:
        raise ValueError(
            f"its contents are not the official ones (sha256 {digest[:12]}… instead of "
            f"{file.sha256[:12]}…)"
        )
