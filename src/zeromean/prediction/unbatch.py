"""Tensors that a forward pass has stored in the model while `torch.func.vmap` ran it.

They hold all samples of a chunk, and outside of vmap they are of no use: they can be neither copied
nor saved, and a model that goes on from its state would fail.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    maybe_current_level,
    maybe_get_bdim,
    maybe_get_level,
)

from zeromean.layers.surgery import own_attributes


def take_escaped_(model: nn.Module) -> None:
    """Let everything stored in the model be that of the last sample, as after a loop."""
    for module in model.modules():
        for name, value in own_attributes(module, (Tensor, tuple, list, dict)).items():
            of_last = _of_last_sample(value)
            if of_last is not value:
                setattr(module, name, of_last)
        for name, buffer in module._buffers.items():
            module._buffers[name] = _of_last_sample(buffer)


def _of_last_sample(value: Any) -> Any:
    if isinstance(value, Tensor):
        # One that belongs to a vmap around the prediction is still in use.
        outside = maybe_current_level() or 0
        while is_batchedtensor(value) and maybe_get_level(value) > outside:
            value = get_unwrapped(value).select(maybe_get_bdim(value), -1)
    elif type(value) is tuple:
        items = tuple(map(_of_last_sample, value))
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return items if changed else value
    elif type(value) is list:
        value[:] = map(_of_last_sample, value)
    elif type(value) is dict:
        for key, item in value.items():
            value[key] = _of_last_sample(item)
    return value
