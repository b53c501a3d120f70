"""Dropout is for training here: in a network that is returned it would be on at prediction."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from zeromean.layers.attention import MultiheadAttention
from zeromean.layers.recurrent import RecurrentLayer


def without_dropout_(model: nn.Module) -> nn.Module:
    """Set every rate of torch's dropout to zero, in place."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(
            module, (nn.MultiheadAttention, MultiheadAttention, nn.RNNBase, RecurrentLayer)
        ):
            module.dropout = 0.0
    return model
