"""Dense layers in 8-bit integers, for inference that is smaller and faster."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from zeromean.arguments import require_floating, require_integer, require_model
from zeromean.compression.graph.annotations import has_hooks
from zeromean.compression.modules.batch_last import BatchLast
from zeromean.layers.surgery import copy_with_masks, replace_modules_


def to_int8(model: nn.Module, *, min_weights: int = 2**16) -> nn.Module:
    """A copy of the model with its large plain linear layers in int8, for inference.

    It pays for batches; a single example may take longer than before, unless layers are very large.
    Stochastic layers stay as they are: make them plain first (`zm.to_deterministic`,
    `zm.compress`). So do layers with hooks. Sparse layers gain more from `zm.compress`.

    Args:
        min_weights: Number of weights from which a layer is converted.
    """
    require_model(model)
    require_integer("min_weights", min_weights)
    model = copy_with_masks(model)
    large: dict[nn.Module, nn.Module] = {
        module: Int8Linear(module).train(module.training)
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.numel() >= min_weights
        if not has_hooks(module)
    }
    if not large:
        raise ValueError(
            f"The model has no plain linear layer of at least {min_weights} weights without "
            "hooks; make stochastic layers plain with zm.to_deterministic first, or lower "
            "min_weights."
        )
    chains = [
        m for m in model.modules() if isinstance(m, BatchLast) and large.keys() & m.children()
    ]
    model = replace_modules_(model, {chain: chain.unrolled() for chain in chains})
    return replace_modules_(model, large)


class Int8Linear(nn.Module):
    """A plain linear layer in int8: a scale for each neuron's weights and each example's inputs.

    For inference. It needs a quarter of the memory of float32, and multiplies in integers; in
    float32 on CPUs without integer dot products (VNNI), where it is not faster.

    Args:
        layer: The layer to round to 8 bits.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = _wide(layer.weight.detach())
        scale = weight.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny) / 127
        weight = (weight / scale.unsqueeze(1)).round().to(torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    @torch.no_grad()  # Rounding has no useful gradient, though autograd would compute one.
    def forward(self, input: Tensor) -> Tensor:
        require_floating("Int8Linear", input)
        rows = _wide(input.reshape(-1, self.in_features))
        largest = rows.abs().amax(1, keepdim=True)
        step = largest.clamp_min(torch.finfo(rows.dtype).tiny) / 127
        integers = (rows / step).round_().to(torch.int8)
        output = _product(integers, self.weight.t()) * (step * _wide(self.scale))
        output = output if self.bias is None else output.add_(self.bias)
        return output.to(input.dtype).reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def _product(one: Tensor, other: Tensor) -> Tensor:
    if one.device.type == "cpu" and not _cpu_sums_are_exact():
        return one.float() @ other.float()
    return torch._int_mm(one, other)  # pyright: ignore[reportPrivateImportUsage]


# Apart from the cache, which the compiler would look through.
@torch.compiler.assume_constant_result
def _cpu_sums_are_exact() -> bool:
    return _try_sums()


@cache
def _try_sums() -> bool:
    """Whether products of integers are summed in 32 bits.

    Without VNNI, oneDNN adds pairs of them in 16 bits, which large weights and inputs exceed: the
    sums are then wrong without a word. (oneDNN, "Nuances of int8 computations".)
    """
    largest = torch.full((8, 64), 127, dtype=torch.int8)
    sums = torch._int_mm(largest, largest.t())  # pyright: ignore[reportPrivateImportUsage]
    return bool((sums == 64 * 127**2).all())


def _wide(tensor: Tensor) -> Tensor:
    """Sums of integers overflow in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
