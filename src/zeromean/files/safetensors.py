"""Tensors with a header and a checksum, in the format of safetensors; nothing is unpickled."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeromean.extras import how_to_install
from zeromean.files.atomic import whole_file

CHECKSUM, _CRC = "checksum", "crc32:"  # Files of 0.1.0 have none.


def write_safetensors(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    """Write a file that appears under its name only when it is complete."""
    safetensors = _safetensors()
    metadata = {**metadata, CHECKSUM: _checksum(metadata, tensors)}
    with whole_file(path) as temporary:
        try:
            safetensors.torch.save_file(tensors, temporary, metadata=metadata)
        except safetensors.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            code = int(number[1])
            raise OSError(code, f"{path} could not be written: {os.strerror(code)}") from error


def safetensors_bytes(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """What `write_safetensors` writes."""
    metadata = {**metadata, CHECKSUM: _checksum(metadata, tensors)}
    return _safetensors().torch.save(tensors, metadata=metadata)


def read_safetensors(
    path: str | os.PathLike[str], header: str, writer: str
) -> tuple[str, dict[str, Tensor]]:
    """The text under `header` in the metadata and the tensors of a file that `writer` wrote."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if header not in metadata:
        raise ValueError(f"{path} is a safetensors file, but not one that {writer} wrote.")
    # Also under another name, as which a damage would hide it.
    found = {k: v for k, v in metadata.items() if k == CHECKSUM or v.startswith(_CRC)}
    others = {k: v for k, v in metadata.items() if k not in found}
    if found and found != {CHECKSUM: _checksum(others, tensors)}:
        raise ValueError(
            f"{path} has changed since it was written: its checksum does not fit; save it again, "
            "or copy it again from where it is sound."
        )
    return metadata[header], tensors


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The texts of a file by name. Tensors are not read, so that nobody looks at the checksum."""
    with _opened(path) as file:
        return file.metadata() or {}


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    safetensors = _safetensors()
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); it may have been cut short."
        ) from error


def parse_header(text: str, path: str | os.PathLike[str], newest: int) -> dict[str, Any]:
    """The header of a file, of a format that this version reads."""
    try:
        header = json.loads(text)
        version = header["format_version"]
        if not isinstance(version, int):
            raise TypeError(f"format_version is {version!r}")
    except Exception as error:
        raise damaged_header(path, error) from error
    if version > newest:
        raise ValueError(
            f"{path} has format version {version}, this zeromean reads up to {newest}; "
            "upgrade zeromean."
        )
    return header


def damaged_header(path: str | os.PathLike[str], error: Exception) -> ValueError:
    """What to raise where a header leads to an error."""
    reason = " ".join(repr(error).split())
    reason = reason if len(reason) <= 200 else f"{reason[:197]}..."
    return ValueError(f"{path} has a damaged header ({reason}); save it again.")


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """CRC-32 of everything in a file: of bits that change by accident, one in 2³² goes unseen."""
    value = zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        entry = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        value = zlib.crc32(entry.encode(), value)
        content: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        value = zlib.crc32(content, value)
    return f"{_CRC}{value:08x}"


def _without_aliases(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that share memory once, and which names stand for which."""
    first: dict[tuple, str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            kind = "meta tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"A file holds tensors with values, but {name} is a {kind}; give it values, or "
                "keep it out of the state dict."
            )
        key = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            # Views of one storage are written out: the format knows whole tensors only.
            tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensors, aliases


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(how_to_install("Files of models need safetensors", "io")) from error
    return safetensors
