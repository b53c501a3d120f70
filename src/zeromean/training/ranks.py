"""Random numbers of processes that train one model together."""

from __future__ import annotations

import numpy as np
import torch
from torch import distributed


def seed_ranks(seed: int | None = None) -> int:
    """Give every process of `torch.distributed` noise of its own, and return its seed.

    After the same `torch.manual_seed` on all ranks, which gives them the same initial weights,
    all of them would draw the same noise as well, and averaging their gradients would average
    away none of it. Call it on every rank, after the model is built. Without a process group it
    seeds as rank 0 would.

    Args:
        seed: The same on all ranks; default: what torch was seeded with.
    """
    rank = (
        distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    )
    return seed_rank(rank, torch.initial_seed() if seed is None else seed)


def seed_rank(rank: int, seed: int) -> int:
    """Seed torch's generators as one rank of several."""
    mixed = int(np.random.SeedSequence((seed % 2**64, rank)).generate_state(1, np.uint64)[0] >> 1)
    torch.manual_seed(mixed)
    return mixed
