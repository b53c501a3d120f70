"""Compressed models as files: safetensors that load without pickle, and ONNX.

from zeromean import export

export.save_compressed(zm.compress(model), "small.safetensors", original=model)
export.load_compressed("small.safetensors")
export.save_onnx(zm.compress(model), "small.onnx", example_inputs)
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zeromean.arguments import require_model
from zeromean.compression.export import sparse_coding, tensor_codes
from zeromean.compression.export.blueprint import build, describe
from zeromean.compression.export.sizes import size_in_memory
from zeromean.compression.export.transformer_blueprint import KINDS
from zeromean.files.safetensors import (
    damaged_header,
    parse_header,
    read_safetensors,
    safetensors_bytes,
    write_safetensors,
)
from zeromean.registry import UnregisteredError

# 1: the first. 2: weights can be written in bits. 3: torch's transformer layers and attention are
# described.
FORMAT_VERSION = 3
HEADER = "zeromean.compressed"


@dataclass(frozen=True)
class SavedFile:
    """A file that was written.

    Attributes:
        size: Bytes of the file.
        original_size: Bytes of the parameters and buffers of the original network, if it was given.
    """

    path: Path
    size: int
    original_size: int | None = None

    @property
    def ratio(self) -> float | None:
        """How many times smaller the file is."""
        return None if self.original_size is None else self.original_size / self.size

    def __str__(self) -> str:
        text = f"{self.path}: {self.size:,} bytes"
        if self.ratio is not None:
            text += f", {self.ratio:.1f}× smaller than {self.original_size:,}"
        return text


def save_compressed(
    model: nn.Module, path: str | os.PathLike[str], *, original: nn.Module | None = None
) -> SavedFile:
    """Write a compressed model, architecture and all, to a safetensors file.

    Sparse weights are written as their values and about a byte for the place of each. Weights that
    are whole multiples of a step, as `zm.quantize_` leaves them, or that have few values, are
    written in bits: those of the multiples, and a step for each tensor or neuron. They come back as
    they were; within two roundings, where a BatchNorm has been taken into rounded weights.

    Args:
        model: What `zm.compress` returned, or torch's usual layers in nn.Sequential.
        path: The file appears under its name only when it is complete.
        original: The network before compression, for comparison of the sizes: what its weights
            (one number each, stochastic or not), biases and buffers take in its own precision.
    """
    require_model(model)
    if original is not None:
        require_model(original, "original")
    stored, metadata = _contents(model)
    write_safetensors(path, stored, metadata)
    return _saved(path, original)


def compressed_size(model: nn.Module) -> int:
    """Bytes of the file that `save_compressed` would write."""
    stored, metadata = _contents(model)
    return len(safetensors_bytes(stored, metadata))


def _contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a model's file."""
    blueprint, tensors = describe(model)
    stored: dict[str, Tensor] = {}
    sparse: dict[str, list[int]] = {}
    in_bits: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        code = tensor_codes.encode(tensor)
        for ending, part in code.parts.items():
            stored[name + ending] = part.clone(memory_format=torch.contiguous_format)
        if tensor_codes.VALUES in code.parts:
            sparse[name] = list(tensor.shape)
        elif tensor_codes.BITS in code.parts:
            in_bits[name] = list(tensor.shape)
    # Older versions read what has nothing of the newer ones.
    version = 3 if any(type(m) in KINDS for m in model.modules()) else 2 if in_bits else 1
    header = {"format_version": version, "model": blueprint, "sparse": sparse}
    header |= {"bits": in_bits} if in_bits else {}
    return stored, {HEADER: json.dumps(header, separators=(",", ":"))}


def load_compressed(path: str | os.PathLike[str]) -> nn.Module:
    """The model that `save_compressed` wrote: in eval mode, without gradients."""
    text, stored = read_safetensors(path, HEADER, "export.save_compressed")
    header = parse_header(text, path, FORMAT_VERSION)
    try:
        shapes = {name: torch.Size(shape) for name, shape in header["sparse"].items()}
        # Before anything is made of such a shape.
        num_steps = sum(stored[name + tensor_codes.STEPS].numel() for name in shapes)
        sparse_coding.require_plausible(shapes.values(), num_steps)
        sparse_coding.require_plausible([t.shape for t in stored.values() if not t.numel()], 0)
        for name, shape in shapes.items():
            values = stored.pop(name + tensor_codes.VALUES)
            steps = stored.pop(name + tensor_codes.STEPS)
            stored[name] = sparse_coding.decode(values, steps, shape)
        for name, shape in header.get("bits", {}).items():
            bits = stored.pop(name + tensor_codes.BITS)
            stored[name] = tensor_codes.decode_bits(bits, torch.Size(shape))
        return build(header["model"], stored).eval().requires_grad_(False)
    except UnregisteredError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    except Exception as error:  # A damaged header can end in an error of any kind.
        raise damaged_header(path, error) from error


def _saved(path: str | os.PathLike[str], original: nn.Module | None) -> SavedFile:
    path = Path(path)
    before = None if original is None else size_in_memory(original)
    return SavedFile(path, path.stat().st_size, before)
