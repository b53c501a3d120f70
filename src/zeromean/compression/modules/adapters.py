"""Modules that `zm.compress` puts between layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from zeromean.compression.modules.sparse_layers import require_features


class SelectInputs(nn.Module):
    """Pick features: `(*, in_features)` to `(*, len(indices))`, also of a packed sequence."""

    indices: Tensor

    def __init__(self, indices: Tensor, in_features: int):
        super().__init__()
        self.in_features = in_features
        self.register_buffer("indices", indices)

    def forward(self, input: Any) -> Any:
        if isinstance(input, PackedSequence):
            return PackedSequence(self.forward(input.data), *input[1:])
        require_features(input.shape[-1], self.in_features)
        return input.index_select(-1, self.indices)

    def extra_repr(self) -> str:
        return f"{self.indices.numel()} of {self.in_features}"


class RequireDim(nn.Module):
    """Pass on tensors with so many dimensions, and refuse others.

    What `zm.compress` takes for granted where a forward function does not show it: BatchNorm1d
    behind a Linear layer, for one, normalises features in `(N, F)` but steps in `(N, T, F)`.

    Args:
        fewest: Fewest dimensions.
        most: Most dimensions, None for any number.
    """

    def __init__(self, fewest: int, most: int | None = None):
        super().__init__()
        self.fewest = fewest
        self.most = most

    def forward(self, input: Tensor) -> Tensor:
        dims = input.dim()
        if dims < self.fewest or (self.most is not None and dims > self.most):
            number = f"at least {self.fewest}" if self.most is None else f"{self.fewest}"
            raise ValueError(
                f"The network was compressed for tensors of {number} dimensions here, got shape "
                f"{tuple(input.shape)}; compress it with example_inputs of this shape."
            )
        return input

    def extra_repr(self) -> str:
        return f"{self.fewest}" if self.most is None else f"{self.fewest}, {self.most}"
