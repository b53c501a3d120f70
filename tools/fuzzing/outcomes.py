"""What a case may end in."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import nn

REFUSED = "refused"
CHECKED = "checked"
# What torch says where a tensor does not fit memory, or any memory.
TOO_MUCH = ("can't allocate memory", "Storage size calculation overflowed")
# In place of an argument: what people give by mistake.
JUNK: tuple[Any, ...] = (
    None, True, 0, 1, -1, 3, 2**40, 10**30, 1.5, -0.5, math.nan, math.inf, 1j, "", "additive", "0",
    "same", (), (1, 2), [3], {}, {"a": 1}, object(), int, nn.Linear, len, b"x", np.int64(3),
    np.float32(0.5), np.ones(2), torch.ones(2), torch.tensor(2), torch.float8_e4m3fn, torch.int64,
    torch.complex64, torch.bool, range(3), nn.ReLU(),
)  # fmt: skip


def refused(error: BaseException, *, names: str = "") -> str:
    """REFUSED, where an error is a sentence for the one who made the mistake.

    Args:
        names: What the sentence must name.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in TOO_MUCH):
        return REFUSED  # It was asked for, and torch says how much.
    if not isinstance(error, (TypeError, ValueError, OSError, ImportError)):
        raise AssertionError(f"refused by a raw {type(error).__name__}: {text}") from error
    if len(text.split()) < 3 or len(text) > 4000 or names not in text:
        raise AssertionError(f"refused without a sentence: {error!r}") from error
    return REFUSED


def require(condition: Any, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def spoil(arguments: dict[str, Any], generator: random.Random, chance: float) -> str | None:
    """Put junk in the place of one argument, sometimes; return which."""
    if generator.random() >= chance:
        return None
    name = generator.choice(list(arguments))
    arguments[name] = generator.choice(JUNK)
    return name
