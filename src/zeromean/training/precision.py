"""In which precision a network is trained."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from zeromean.training.config import Precision

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """Where the passes of a network run; float32 leaves everything as it is."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device, dtype=_DTYPES[precision])


def in_full(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """Where the loss and the KL term are computed, whatever is cast around them."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device, enabled=False)


def require_precision(precision: Precision, device: str = "cpu") -> None:
    """Refuse a precision that a device does not have, or would only emulate."""
    if precision == "bfloat16" and device == "cpu" and not computes_in_bfloat16():
        raise ValueError(
            "precision='bfloat16' needs a CPU that computes in it (AVX-512 or AMX, through "
            "oneDNN), which this one does not; use precision='float32'."
        )
    if precision == "bfloat16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise ValueError(
            "precision='bfloat16' needs a GPU that computes in it, which this one does not; use "
            "precision='float16'."
        )
    if precision == "float16" and device == "cpu" and not computes_in_float16():
        raise ValueError(
            "precision='float16' needs a GPU: this torch has no layers in float16 for CPUs; use "
            "precision='float32'."
        )


def computes_in_bfloat16() -> bool:
    """Whether convolutions and products in bfloat16 have kernels of their own on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def computes_in_float16() -> bool:
    """Whether torch has convolutions and products in float16 on CPUs, however slow."""
    x = torch.ones(2, 1, 3, 3, requires_grad=True)
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            y = F.linear(F.conv2d(x, torch.ones(1, 1, 3, 3)).flatten(1), torch.ones(1, 1))
        y.float().sum().backward()
    except RuntimeError:
        return False
    return True


def gradient_scaler(device: str) -> Any:
    """Lightning's plugin that scales the loss of float16, and leaves casting to `autocast`."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    return MixedPrecision("16-mixed", device, torch.amp.GradScaler(device))
