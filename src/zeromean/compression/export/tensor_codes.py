"""Tensors of a file in as few bytes as they need, and back.

Weights are written whole, as non-zero values and their places (`sparse_coding.py`), or in bits:
as whole multiples of steps where they are on a grid, or as numbers of values in a list where there
are few; in order, or without the zeros and with the gaps between the others.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeromean.compression.export import bit_packing, sparse_coding
from zeromean.compression.export.grids import find_grids, signed

VALUES, STEPS, BITS = ".values", ".steps", ".bits"

_HEAD = struct.Struct("<BBBI")  # groups, flags, type of the tensor, steps or values
_SPARSE, _NO_ZERO = 1, 2
_WHOLE, _BY_DIM_0, _BY_DIM_1, _LISTED = range(4)
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Zeros cost nothing, so that few bytes could ask for any memory.
_MOST_PER_BYTE, _MOST_FOR_NOTHING = 2**12, 2**16
_SAMPLE = 4096


@dataclass(frozen=True)
class TensorCode:
    """What stands for a tensor in a file: its parts by their endings, "" for the tensor itself."""

    parts: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def encode(tensor: Tensor) -> TensorCode:
    """The shortest code of a tensor."""
    tensor = tensor.detach()
    codes = [TensorCode({"": tensor})]
    if sparse_coding.pays(tensor):
        values, steps = sparse_coding.encode(tensor)
        codes.append(TensorCode({VALUES: values, STEPS: steps}))
    if tensor.dtype in _TYPES and tensor.dim() >= 2 and tensor.numel():
        bits = min(_in_bits(tensor), key=len, default=b"")
        if bits and tensor.numel() <= _most(bits):
            codes.append(TensorCode({BITS: torch.frombuffer(bytearray(bits), dtype=torch.uint8)}))
    return min(codes, key=lambda code: code.nbytes)


def _most(code: bytes) -> int:
    """Elements that a code of this length may stand for."""
    return _MOST_FOR_NOTHING + _MOST_PER_BYTE * len(code)


def size(tensor: Tensor) -> int:
    """Bytes of a tensor in a file."""
    return encode(tensor).nbytes


def decode_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """The tensor of a code in bits. Raises ValueError where it is none, or not of this shape."""
    code = bits.numpy().tobytes()
    if len(code) < _HEAD.size or any(length < 0 for length in shape):
        raise ValueError(f"got {len(code)} bytes for a tensor of shape {tuple(shape)}")
    groups, flags, kind, count = _HEAD.unpack_from(code)
    if shape.numel() > _most(code) or kind >= len(_TYPES) or groups > _LISTED:
        raise ValueError(f"got {len(code)} bytes for a tensor of shape {tuple(shape)}")
    dtype = _TYPES[kind]
    numbers, rest = bit_packing.unpack(code[_HEAD.size :])
    places = slice(None)
    if flags & _SPARSE:
        gaps, rest = bit_packing.unpack(rest)
        if len(gaps) != len(numbers) or (len(gaps) and gaps.max() >= shape.numel()):
            raise ValueError(f"got {len(gaps)} places for {len(numbers)} values")
        places = np.cumsum(gaps + 1) - 1
        if len(places) and places[-1] >= shape.numel():
            raise ValueError(f"got a place beyond the {shape.numel()} of the tensor")
    elif len(numbers) != shape.numel():
        raise ValueError(f"got {len(numbers)} values for {shape.numel()}")
    listed = groups == _LISTED
    kept = dtype if listed else torch.float32
    if len(rest) != count * kept.itemsize:
        raise ValueError(f"got {len(rest)} bytes for {count} steps or values")
    table = torch.from_numpy(np.frombuffer(rest, np.uint8).copy()).view(kept)
    flat = np.zeros(shape.numel(), dtype=np.int64)
    if listed:
        flat[places] = numbers + 1
        if len(numbers) and numbers.max() >= count:
            raise ValueError(f"got a number beyond the {count} of a list")
        return torch.cat([table.new_zeros(1), table])[torch.from_numpy(flat)].view(shape)
    numbers = numbers + 1 if flags & _NO_ZERO else numbers
    flat[places] = np.where(numbers % 2 == 1, (numbers + 1) // 2, -(numbers // 2))
    steps = table.double()
    if groups != _WHOLE:
        dim = groups - _BY_DIM_0
        if dim >= len(shape) or count != shape[dim]:
            raise ValueError(f"got {count} steps for the shape {tuple(shape)}")
        steps = steps.view([-1 if d == dim else 1 for d in range(len(shape))])
    elif count != 1:
        raise ValueError(f"got {count} steps for one tensor")
    return (torch.from_numpy(flat).view(shape) * steps).to(dtype)


def _in_bits(tensor: Tensor) -> list[bytes]:
    """By a list of values and on a grid, where either is possible."""
    values = tensor.double().cpu().numpy()
    if not np.isfinite(values).all():
        return []
    codes = [_listed(tensor, values)]
    by_group = {
        _WHOLE: values.reshape(1, -1),
        _BY_DIM_0: values.reshape(len(values), -1),
        _BY_DIM_1: np.moveaxis(values, 1, 0).reshape(values.shape[1], -1),
    }
    # A loose fit is for rows that were multiplied; types of few digits have no room for one.
    fits = (False, True) if tensor.dtype in (torch.float32, torch.float64) else (False,)
    for loose, (groups, rows) in itertools.product(fits, by_group.items()):
        grids = find_grids(rows, tensor.dtype, loose=loose)
        if grids is not None:
            numbers = signed(rows, grids[0])
            if groups == _BY_DIM_1:
                moved = (values.shape[1], values.shape[0], *values.shape[2:])
                numbers = np.moveaxis(numbers.reshape(moved), 0, 1)
            codes.append(_gridded(tensor, groups, numbers.reshape(-1), grids[1]))
            break  # The fewest steps, and exact ones first.
    return [code for code in codes if code]


def _gridded(tensor: Tensor, groups: int, numbers: np.ndarray, steps: np.ndarray) -> bytes:
    # 0, 1, −1, 2, −2, …
    folded = np.where(numbers > 0, 2 * numbers - 1, -2 * numbers)
    nonzero = folded != 0
    if nonzero.all():
        return _code(tensor, groups, _NO_ZERO, folded - 1, None, steps.tobytes(), len(steps))
    in_order = _code(tensor, groups, 0, folded, None, steps.tobytes(), len(steps))
    sparse = _code(
        tensor, groups, _NO_ZERO, folded[nonzero] - 1, nonzero, steps.tobytes(), len(steps)
    )
    return min(in_order, sparse, key=len)


def _listed(tensor: Tensor, values: np.ndarray) -> bytes:
    """By numbers of values in a list, the frequent ones first."""
    flat = values.reshape(-1)
    # Few values in many, or the list is no shorter: seen at once.
    sample = flat[:: max(flat.size // _SAMPLE, 1)]
    sample = sample[sample != 0]
    if len(np.unique(sample)) > max(len(sample) // 2, 16):
        return b""
    codes = []
    for nonzero in (None, flat != 0):
        found, which, counts = np.unique(
            flat if nonzero is None else flat[nonzero], return_inverse=True, return_counts=True
        )
        order = np.argsort(-counts, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        table = torch.from_numpy(found[order]).to(tensor.dtype)
        listed = table.view(torch.uint8).numpy().tobytes() if len(table) else b""
        codes.append(_code(tensor, _LISTED, 0, rank[which], nonzero, listed, len(found)))
    return min(codes, key=len)


def _code(
    tensor: Tensor,
    groups: int,
    flags: int,
    numbers: np.ndarray,
    nonzero: np.ndarray | None,
    table: bytes,
    count: int,
) -> bytes:
    sparse = 0 if nonzero is None else _SPARSE
    parts = [
        _HEAD.pack(groups, flags | sparse, _TYPES.index(tensor.dtype), count),
        bit_packing.pack(numbers),
    ]
    if nonzero is not None:
        parts.append(bit_packing.pack(np.diff(np.flatnonzero(nonzero), prepend=-1) - 1))
    return b"".join([*parts, table])
