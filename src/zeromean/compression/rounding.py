"""Plain networks with weights of few bits, for smaller files.

`zm.quantize_` asks the posterior how many bits each weight needs. A plain network has none; here
all weights get the same width, on a grid for each neuron, and who calls measures what it costs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeromean.compression.bit_widths import on_grid
from zeromean.compression.modules.sparse_layers import SparseLinear
from zeromean.layers.stochastic_module import StochasticModule
from zeromean.layers.surgery import copy_with_masks, replace_modules_


@torch.no_grad()
def rounded(model: nn.Module, bits: int) -> nn.Module:
    """A copy whose weights are whole multiples of a step, one for each row, in so many bits.

    Biases and normalization stay as they are. `export.save_compressed` writes the bits.
    """
    model = copy_with_masks(model)
    sparse = {
        m: SparseLinear(_rows(m.weight, bits), m.bias)
        for m in model.modules()
        if type(m) is SparseLinear
    }
    model = replace_modules_(model, sparse)
    for module in model.modules():
        if isinstance(module, (StochasticModule, SparseLinear)):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.copy_(_rows(parameter, bits))
    return model


def _rows(weight: Tensor, bits: int) -> Tensor:
    rows = weight.detach().double().flatten(1)
    return on_grid(rows, rows != 0, bits).view(weight.shape).to(weight.dtype)
