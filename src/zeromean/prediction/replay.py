"""Computing once what no noise has reached, over repeated runs of the same function.

Inside `torch.func.vmap` a tensor that depends on the sample is batched, and one that does not is
plain. `Replay` records the first run; in later runs every call that only plain tensors went into
gives back its recorded result. Of these only the tensors that noise has read are kept: nothing
reads the others again. The record lives as long as one prediction, so nothing can be stale.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode

_NOISY = object()
# Stands for results that only replayed calls read. On the meta device, so that a call which
# nothing intercepts cannot compute with it unnoticed.
_UNREAD = torch.empty(0, device="meta")

_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
) | {"__setitem__", "__set__"}


class ReplayError(RuntimeError):
    """A later run did something else than the first one."""


class Replay(TorchFunctionMode):
    """Record the first run under this mode, and replay its noise-free results in the others.

    Args:
        keep_all: Keep every noise-free tensor: somebody looks at them from outside (hooks).

    Attributes:
        recorded: Whether the first run is over.
        replayable: False when the noise-free part writes into a tensor that noise has read before;
            every run is then computed in full.
        largest_noisy: Elements of the largest noisy result, for one sample.
    """

    def __init__(self, *, keep_all: bool = False):
        super().__init__()
        self.keep_all = keep_all
        self.recorded = False
        self.replayable = True
        self.largest_noisy = 0
        self._calls: list[tuple[Callable, Any]] = []
        self._kept: dict[int, Tensor] = {}
        self._index_of: dict[int, int] = {}  # id of a tensor -> the call that made it
        self._position = 0
        self._read_by_noise: set[int] = set()

    def __exit__(self, *exception):
        if not self.recorded:
            # What something else still refers to (a buffer, a list of activations) is kept too.
            for index, (_, result) in enumerate(self._calls):
                tensor = result() if isinstance(result, weakref.ref) else None
                if tensor is not None:
                    self._kept[index] = tensor
        self.recorded = True
        self._position = 0
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.recorded:
            return self._record(func, args, kwargs)
        if not self.replayable:
            return func(*args, **kwargs)
        return self._replay(func, args, kwargs)

    def keep(self, tensor: Tensor) -> None:
        """Keep a noise-free tensor for the later runs, as if noise had read it."""
        index = self._index_of.get(id(tensor))
        if index is not None and self._calls[index][1]() is tensor:
            self._kept[index] = tensor

    def _record(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        inputs = list(_tensors((args, kwargs)))
        plain = [t for t in inputs if not is_batchedtensor(t)]
        if _writes_in_place(func, kwargs) and any(
            _storage(t) in self._read_by_noise for t in plain
        ):
            self.replayable = False
        if func == Tensor.data_ptr:
            self.replayable = False  # Whoever asks for an address may use it unseen.
        result = func(*args, **kwargs)
        outputs = list(_tensors(result))
        noisy = len(plain) < len(inputs) or any(map(is_batchedtensor, outputs))
        if noisy:
            for tensor in plain:
                self.keep(tensor)
                self._read_by_noise.add(_storage(tensor))
            self.largest_noisy = max([self.largest_noisy, *(t.numel() for t in outputs)])
            self._calls.append((func, _NOISY))
        elif isinstance(result, Tensor):
            self._index_of[id(result)] = len(self._calls)
            if self.keep_all:
                self._kept[len(self._calls)] = result
            self._calls.append((func, weakref.ref(result)))
        else:
            self._calls.append((func, _fresh(result)))
        return result

    def _replay(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        index = self._position
        if index == len(self._calls) or self._calls[index][0] != func:
            raise ReplayError
        self._position += 1
        result = self._calls[index][1]
        if result is _NOISY:
            if any(tensor.is_meta for tensor in _tensors((args, kwargs))):
                raise ReplayError
            return func(*args, **kwargs)
        if isinstance(result, weakref.ref):
            return self._kept.get(index, _UNREAD)
        return _fresh(result)


def _fresh(result: Any) -> Any:
    """A copy of a result: the model may empty a list, which must be full again in the next run."""
    return copy.copy(result) if isinstance(result, (list, dict, set)) else result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
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
        or name in _IN_PLACE_OPERATORS
        or bool(kwargs.get("inplace"))
        or kwargs.get("out") is not None
    )
