"""Bytes of networks: as they are trained, and as they are stored."""

from __future__ import annotations

from torch import nn

from zeromean.compression.export import tensor_codes
from zeromean.compression.export.blueprint import stored_tensors
from zeromean.distributions.posteriors.posterior import Posterior


def size_in_memory(model: nn.Module) -> int:
    """Bytes of a network with one number for every weight, stochastic or not."""
    posteriors = {m for m in model.modules() if isinstance(m, Posterior)}
    inside = {id(t) for p in posteriors for t in (*p.parameters(), *p.buffers())}
    others = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    size = sum(p.numel() * p.dtype.itemsize for p in posteriors)
    return size + sum(nbytes for key, nbytes in others.items() if key not in inside)


def size_in_file(model: nn.Module) -> int:
    """Bytes of the tensors in a file that `export.save_compressed` writes."""
    modules = [m for m in model.modules() if not isinstance(m, Posterior)]
    tensors = [tensor for module in modules for tensor in stored_tensors(module).values()]
    return sum(map(tensor_codes.size, tensors))
