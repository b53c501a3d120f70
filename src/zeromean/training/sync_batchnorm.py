"""BatchNorm's statistics where several processes train one model, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from zeromean.distributions.posteriors.posterior import Posterior


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """What normalization layers keep for predictions: training writes it and never reads it."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        for key, buffer in module.named_buffers(recurse=False)
    }


def forward_reads_buffers(model: nn.Module) -> bool:
    """Whether a step may depend on buffers that the one before has changed.

    Those of posteriors (masks, what they go back to) are the same in all processes anyway.
    """
    return any(
        not isinstance(module, (_NormBase, Posterior)) and any(True for _ in module.buffers(False))
        for module in model.modules()
    )


class SyncedBatchNorm(TorchFunctionMode):
    """In the block, `F.batch_norm` in training has the moments of the examples of all processes.

    torch.nn.SyncBatchNorm refuses CPUs, and stays in copies of a network that one process makes for
    itself. All processes must come to the same calls in the same order.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        function = _batch_norm if func is F.batch_norm else func
        return function(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    # As torch's, which has its moments in full precision under autocast.
    x = input if input.dtype == torch.float64 else input.float()
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = x.new_tensor(x.numel() // x.shape[1])
    distributed.all_reduce(count)
    if count == 1:
        raise ValueError(
            "BatchNorm needs more than one value a channel in training, got inputs of shape "
            f"{tuple(input.shape)}; use larger mini-batches."
        )
    mean = _Sum.apply(x.sum(dims)) / count
    centred = x - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(dims)) / count
    with torch.no_grad():
        for running, value in (
            (running_mean, mean),
            (running_var, variance * (count / (count - 1))),
        ):
            if running is not None:
                running.lerp_(value.to(running.dtype), momentum)
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    outputs = centred * scale.view(shape)
    outputs = outputs if bias is None else outputs + bias.view(shape)
    return outputs.to(input.dtype)


class _Sum(torch.autograd.Function):
    """The sum over all processes; each has a part in the loss of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        distributed.all_reduce(total)
        return total
