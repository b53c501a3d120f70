"""Whole numbers in few bits, without a loop over them.

Every number is cut in two: its lowest bits are written as they are, what is above them in unary, as
so many zeros and a one (the code of Rice, with all low bits before all high ones). Small numbers
then cost little more than their entropy, and numpy packs and unpacks either part at once. Where
numbers use their range evenly, the high part is left out and all bits are low ones.
"""

from __future__ import annotations

import struct

import numpy as np

_HEAD = struct.Struct("<BII")  # low bits (plus _FIXED), numbers, bytes of the high part
_FIXED = 0x80
_MOST_BITS = 48


def size(numbers: np.ndarray) -> int:
    """Bytes of the code."""
    return _HEAD.size + sum(_best(numbers)[1])


def pack(numbers: np.ndarray) -> bytes:
    """The code of whole numbers that are not negative."""
    bits, (low_size, high_size) = _best(numbers)
    head = _HEAD.pack(bits | (0 if high_size else _FIXED), len(numbers), high_size)
    low = np.empty((len(numbers), bits), dtype=np.uint8)
    for bit in range(bits):
        low[:, bit] = (numbers >> bit) & 1
    parts = [head, np.packbits(low, bitorder="little").tobytes()]
    if high_size:
        high = np.zeros(8 * high_size, dtype=np.uint8)
        high[np.cumsum((numbers >> bits) + 1) - 1] = 1
        parts.append(np.packbits(high, bitorder="little").tobytes())
    assert len(parts[1]) == low_size
    return b"".join(parts)


def unpack(code: bytes) -> tuple[np.ndarray, bytes]:
    """The numbers, and what follows their code. Raises ValueError where it is no code.

    There are at most eight numbers a byte, so that a small file asks for little memory.
    """
    if len(code) < _HEAD.size:
        raise ValueError("a code of numbers ends before its header does")
    flags, count, high_size = _HEAD.unpack_from(code)
    bits, fixed = flags & ~_FIXED, bool(flags & _FIXED)
    low_size = -(-count * bits // 8)
    end = _HEAD.size + low_size + high_size
    if bits > _MOST_BITS or end > len(code) or (fixed and (high_size or (count and not bits))):
        raise ValueError(f"got a code of {len(code)} bytes for {count} numbers")
    packed = np.frombuffer(code, np.uint8, low_size, _HEAD.size)
    low = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    numbers = np.zeros(count, dtype=np.int64)
    for bit in range(bits):
        numbers |= low[:, bit].astype(np.int64) << bit
    if not fixed:
        high = np.frombuffer(code, np.uint8, high_size, _HEAD.size + low_size)
        ends = np.flatnonzero(np.unpackbits(high, bitorder="little"))
        if len(ends) != count:
            raise ValueError(f"got {len(ends)} high parts for {count} numbers")
        above = np.diff(ends, prepend=-1) - 1
        if count and int(above.max()) >> (62 - bits):
            raise ValueError("got a number beyond 62 bits")
        numbers |= above << bits
    return numbers, code[end:]


def _best(numbers: np.ndarray) -> tuple[int, tuple[int, int]]:
    """How many bits are low ones, and the bytes of both parts; the high one may be empty."""
    count = len(numbers)
    largest = int(numbers.max()) if count else 0
    width = max(largest.bit_length(), 1)
    best = (width, (-(-count * width // 8), 0))
    for bits in range(width):
        sizes = (-(-count * bits // 8), -(-(count + int((numbers >> bits).sum())) // 8))
        if sum(sizes) < sum(best[1]):
            best = (bits, sizes)
    return best
