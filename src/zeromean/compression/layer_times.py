"""How long the layers of a network take, one by one."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from zeromean.compression.speed import one_thread
from zeromean.prediction.inputs import Inputs, as_arguments

_REPEATS = 15


def layer_milliseconds(model: nn.Module, inputs: Inputs, names: Container[str]) -> dict[str, float]:
    """The median CPU time of every layer of these names, for all its calls in one prediction.

    Layers that are never called as modules, such as those in a chain that is multiplied as a whole,
    are missing.
    """
    model = copy.deepcopy(model).eval()
    args, kwargs = as_arguments(inputs)
    spent: dict[str, float] = {}
    for name, module in model.named_modules():
        if name in names:
            module.register_forward_pre_hook(_start(name, spent), prepend=True)
            module.register_forward_hook(_stop(name, spent))
    found: dict[str, list[float]] = {}
    with one_thread(), torch.inference_mode():
        model(*args, **kwargs)  # Plans and allocates.
        for _ in range(_REPEATS):
            spent.clear()
            model(*args, **kwargs)
            for name, seconds in spent.items():
                found.setdefault(name, []).append(1000 * seconds)
    return {name: statistics.median(times) for name, times in found.items()}


def _start(name: str, spent: dict[str, float]) -> Callable[..., None]:
    def start(*_: Any) -> None:
        spent[name] = spent.get(name, 0.0) - time.process_time()

    return start


def _stop(name: str, spent: dict[str, float]) -> Callable[..., None]:
    def stop(*_: Any) -> None:
        spent[name] += time.process_time()

    return stop
