"""Moments through the layers of compressed networks: as through the dense layers that they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeromean.compression.modules.batch_last import BatchLast
from zeromean.compression.modules.sparse_layers import SparseConv2d, SparseLinear
from zeromean.moments import RandomTensor, register


@register(SparseLinear, SparseConv2d)
def _sparse(module: Any, x: Tensor) -> Tensor:
    if isinstance(x, RandomTensor):
        return module.dense()(x)
    return type(module).forward(module, x)


@register(BatchLast)
def _batch_last(module: Any, x: Tensor) -> Tensor:
    if not isinstance(x, RandomTensor):
        return type(module).forward(module, x)
    for step in module.steps():
        x = step(x)
    return x
