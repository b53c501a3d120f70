"""Random numbers of a prediction that leave the global generators as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from torch import nn

from zeromean.arguments import require_seed

_SEEDING = RLock()
# Odd, so that no two of 2³² samples have the same seed on a CPU, whose generator takes 32 bits.
_STRIDE = 0x9E3779B97F4A7C15


@contextmanager
def seeded(seed: int, model: nn.Module) -> Iterator[Callable[[int], None]]:
    """Seed the generators of the model's devices inside the block, and restore them after it.

    Gives a function that seeds them anew, for draws that do not depend on those before: of the
    samples from the given number on. Those from 0 on have the seed itself.
    """
    seed = require_seed(seed)
    with forked_generators(model) as devices:

        def seed_from(sample: int) -> None:
            part = (seed + sample * _STRIDE) % 2**64 if sample else seed
            # Not torch.manual_seed, which seeds generators that are not restored.
            torch.default_generator.manual_seed(part)
            for device in devices:
                if device.type == "cuda":
                    torch.cuda.default_generators[device.index].manual_seed(part)
                elif device.type in ("mps", "xpu"):
                    getattr(torch, device.type).manual_seed(part)  # Nothing would restore these.

        seed_from(0)
        yield seed_from


@contextmanager
def forked_generators(model: nn.Module) -> Iterator[set[torch.device]]:
    """Restore the generators of the model's devices, which it gives, after the block.

    One block at a time in a process: the generators are those of all threads.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    on_cuda = sorted(device.index for device in devices if device.type == "cuda")
    with _SEEDING, torch.random.fork_rng(devices=on_cuda):
        yield devices
