"""The state of the global random generators: kept apart from the caller's, saved and restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derived_seed(*numbers: int) -> int:
    """One seed from several numbers, unrelated to that of other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed the global generators inside the block, and put back the caller's state after it."""
    before = random_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        yield
    finally:
        set_random_state(before)


def random_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, in plain containers and tensors."""
    _, keys, *position = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys, dtype=np.int64)), *position),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go back to what `random_state` returned."""
    random.setstate(state["python"])
    keys, *position = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(state["torch"])
    # A checkpoint may come from a machine with other devices; then its noise is not that one's.
    if "cuda" in state and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
