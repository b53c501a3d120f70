"""Random numbers of a prediction that leave the global generators as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from torch import nn

from zeromean.arguments import require_seed

_SEEDING = RLock()


@contextmanager
def seeded(seed: int, model: nn.Module) -> Iterator[None]:
    """Seed the generators of the model's devices inside the block, and restore them after it."""
    seed = require_seed(seed)
    with forked_generators(model) as devices:
        # Not torch.manual_seed, which seeds generators that are not restored.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(seed)
            elif device.type in ("mps", "xpu"):
                getattr(torch, device.type).manual_seed(seed)  # Nothing would restore these.
        yield


@contextmanager
def forked_generators(model: nn.Module) -> Iterator[set[torch.device]]:
    """Restore the generators of the model's devices, which it gives, after the block.

    One block at a time in a process: the generators are those of all threads.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    on_cuda = sorted(device.index for device in devices if device.type == "cuda")
    with _SEEDING, torch.random.fork_rng(devices=on_cuda):
        yield devices
