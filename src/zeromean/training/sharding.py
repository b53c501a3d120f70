"""A model divided among processes (FSDP2): parameters, gradients and the optimizer's moments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from zeromean.training.optimizers import NesterovAndAdam


def shard_(module: nn.Module, device: torch.device, world_size: int, step: str) -> None:
    """Divide a module among all processes; it is whole in its method `step`, and nowhere else.

    It is one unit: the KL in the loss needs all parameters at once.
    """
    scalars = {p for p in module.parameters() if p.dim() == 0}  # FSDP2 refuses them.
    for parameter in scalars:
        parameter.register_hook(_averaged)
    mesh = init_device_mesh(device.type, (world_size,))
    options: dict[str, Any] = (
        {"ignored_params": scalars} if scalars else {}
    )  # Newer than fully_shard.
    fully_shard(module, mesh=mesh, reshard_after_forward=False, **options)
    register_fsdp_forward_method(module, step)


def forget_shards() -> None:
    """Before a fork: torch caches sizes of shards, and those of a child are others.

    In the child it would be too late, since the cache has a lock for each thread of its parent.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # Not in every torch.

    _clear_sharding_prop_cache()


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """With all parameters of a sharded module in every process; all of them enter the block."""
    if not isinstance(module, FSDPModule):  # What it has is known of it then.
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


@contextmanager
def changed_whole(module: nn.Module) -> Iterator[None]:
    """The same for a block that changes parameters in place, alike in every process."""
    if not is_sharded(module):
        yield
        return
    with whole(module):
        yield
        changed = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            mesh, mine = parameter.device_mesh, parameter.to_local().detach()
            # As torch.chunk divides rows: the last processes may have fewer, or none.
            start = mesh.get_local_rank() * -(-len(parameter) // mesh.size())
            mine.copy_(changed[name][start : start + len(mine)])


def gathered(state: Any) -> Any:
    """A state whose tensors are whole, in every process; all of them ask for it."""
    return tree_map_only(DTensor, lambda shards: shards.full_tensor(), state)


@dataclass(frozen=True)
class WholeModel:
    """A model, and its likelihood, that nothing has divided."""

    model: nn.Module
    likelihood: Any

    def take_(self, module: Any) -> None:
        """Give them what a module with their sharded copies has come to; all processes ask."""
        for mine, theirs in ((self.model, module.model), (self.likelihood, module.likelihood)):
            if mine is not theirs and isinstance(mine, nn.Module):
                mine.to(module.device).load_state_dict(gathered(theirs.state_dict()))


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor on the device of another, and in shards where that is; all processes ask."""
    if isinstance(tensor, DTensor) or not isinstance(other, DTensor):
        return tensor.to(other.device)
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)


def shard_moments_(optimizer: torch.optim.Optimizer) -> None:
    """Divide what an optimizer remembers as the parameters are, once it is loaded whole."""
    for part in optimizer.parts if isinstance(optimizer, NesterovAndAdam) else [optimizer]:
        for parameter, state in part.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = placed_like(value, parameter)


def _averaged(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()
