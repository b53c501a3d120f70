"""In which precision a network is trained."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zeromean.training.config import Precision


def autocast(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """Where the passes of a network run; float32 leaves everything as it is."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16)


def require_precision(precision: Precision) -> None:
    """Refuse bfloat16 where this CPU would only emulate it."""
    if precision == "bfloat16" and not computes_in_bfloat16():
        raise ValueError(
            "precision='bfloat16' needs a CPU that computes in it (AVX-512 or AMX, through "
            "oneDNN), which this one does not; use precision='float32'."
        )


def computes_in_bfloat16() -> bool:
    """Whether convolutions and products in bfloat16 have kernels of their own on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
