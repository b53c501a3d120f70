"""Computing once what no noise has reached, over repeated runs of the same function.

Inside `torch.func.vmap` a tensor that depends on the sample is batched, and one that does not is
plain. `Replay` records the results of the first run; later runs get the plain ones back without
computing them again. Nothing is cached past its lifetime, so there is nothing to invalidate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode

_NOISY = object()


class ReplayError(RuntimeError):
    """A later run called other operations than the first one."""


class Replay(TorchFunctionMode):
    """Record the first run under this mode, and replay its noise-free results in the others.

    Attributes:
        largest_noisy: Elements of the largest noisy result for one sample.
        replayable: False when the noise-free part writes into a tensor that noise has already
            read; the runs must then be computed in full.
    """

    def __init__(self):
        super().__init__()
        self.largest_noisy = 0
        self.replayable = True
        self._calls: list[tuple[Callable, Any]] = []
        self._recorded = False
        self._position = 0
        self._read_by_noise: set[int] = set()

    def __exit__(self, *exception):
        self._recorded = True
        self._position = 0
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self._recorded:
            return self._record(func, args, kwargs)
        if not self.replayable:
            return func(*args, **kwargs)
        if self._position == len(self._calls) or self._calls[self._position][0] != func:
            raise ReplayError
        result = self._calls[self._position][1]
        self._position += 1
        return func(*args, **kwargs) if result is _NOISY else result

    def _record(self, func, args, kwargs):
        plain_inputs = [t for t in _tensors((args, kwargs)) if not _is_noisy(t)]
        writes = _writes_in_place(func, kwargs)
        if writes and any(_storage(t) in self._read_by_noise for t in plain_inputs):
            self.replayable = False
        result = func(*args, **kwargs)
        results = list(_tensors(result))
        noisy = [t for t in results if _is_noisy(t)]
        if noisy:
            self.largest_noisy = max(self.largest_noisy, *(t.numel() for t in noisy))
            self._read_by_noise.update(map(_storage, plain_inputs))
        self._calls.append((func, result if results and not noisy else _NOISY))
        return result


def _is_noisy(tensor: Tensor) -> bool:
    return is_batchedtensor(tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _writes_in_place(func: Callable, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name in ("__setitem__", "__set__")
        or (name.startswith("__i") and name.endswith("__"))
        or bool(kwargs.get("inplace"))
        or kwargs.get("out") is not None
    )
