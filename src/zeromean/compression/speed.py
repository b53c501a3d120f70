"""How long networks take where they run: milliseconds of CPU time, on one thread."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeromean.extras import how_to_install
from zeromean.prediction.inputs import Inputs, as_arguments

# What a measurement of one network takes at least, and how often it is repeated.
_SECONDS = 0.02
_REPEATS = 9


def torch_calls(model: nn.Module, inputs: Inputs) -> Callable[[], Any]:
    """A prediction in torch."""
    args, kwargs = as_arguments(inputs)

    def call() -> Any:
        with torch.inference_mode():
            return model(*args, **kwargs)

    return call


def onnx_calls(path: str | os.PathLike[str], inputs: Inputs) -> Callable[[], Any]:
    """A prediction of an ONNX file in onnxruntime, on one thread."""
    session = one_threaded_session(path)
    args, kwargs = as_arguments(inputs)
    tensors = [t.numpy() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    feed = {put.name: tensor for put, tensor in zip(session.get_inputs(), tensors, strict=True)}
    return lambda: session.run(None, feed)


def one_threaded_session(path: str | os.PathLike[str]) -> Any:
    """What runs an ONNX file on one thread."""
    require_onnxruntime()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        os.fspath(path), options, providers=["CPUExecutionProvider"]
    )


def has_onnxruntime() -> bool:
    return all(find_spec(name) is not None for name in ("onnx", "onnxruntime", "onnxscript"))


def require_onnxruntime() -> None:
    """Say what to install where something is missing."""
    if not has_onnxruntime():
        raise ImportError(
            how_to_install("onnxruntime needs onnx, onnxruntime and onnxscript", "export")
        )


def milliseconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The median of CPU times of each, measured in turn, so that a busy machine is fair to all.

    What others do on the machine does not count, but for what caches and clocks suffer from it.
    """
    with one_thread():
        # The first calls of all plan and allocate.
        counts = {name: max(1, round(_SECONDS / _seconds(call, 3))) for name, call in calls.items()}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_REPEATS):
            for name, call in calls.items():
                found[name].append(_seconds(call, counts[name]))
    return {name: 1000 * statistics.median(times) for name, times in found.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seconds(call: Callable[[], Any], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return max(time.process_time() - start, 1e-9) / count
