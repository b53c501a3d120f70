"""Hidden units of LSTM and GRU: which are silent, which are needed, and layers without the others.

A hidden unit is silent when it is zero at every step: all that its new value reads is zero, and so
is its bias. (A unit that reads nothing but has a bias is not constant: it changes with time.) It
is needed when something reads it: what comes behind the layer, a layer above, or another unit.

torch's layers have the same number of units in every layer and direction: the block that needs
most decides, and the others are filled up with silent units. Flags of hidden units are
`(blocks, hidden_size)`, with a block for every layer and direction (see `states.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NEW_VALUE = 2  # The gate behind the tanh: of LSTM's i, f, g, o and of GRU's r, z, n.


def silent_units(layer: nn.RNNBase, inputs: Tensor) -> Tensor:
    """Which hidden units are zero at every step.

    Args:
        inputs: The value of every input that is constant, NaN for the others.
    """
    found: list[Tensor] = []
    for block in _blocks(layer):
        if block.below is not None:
            below = torch.cat(found[block.below])
            inputs = inputs.new_zeros(()).where(below, torch.nan)
        varies = inputs.isnan()
        from_inputs, from_hidden = block.from_inputs[_NEW_VALUE], block.from_hidden[_NEW_VALUE]
        start = block.input_bias[_NEW_VALUE] + from_inputs[:, ~varies] @ inputs[~varies]
        bias = block.hidden_bias[_NEW_VALUE]
        if isinstance(layer, nn.LSTM):
            start, bias = start + bias, torch.zeros_like(bias)
        silent = (from_inputs[:, varies] == 0).all(1) & (start == 0) & (bias == 0)
        # Units that read only each other start from zero and stay there.
        count = -1
        while count != (count := int(silent.sum())):
            silent &= (from_hidden[:, ~silent] == 0).all(1)
        found.append(silent)
    return torch.stack(found)


def spread_needs_(layer: nn.RNNBase, silent: Tensor, need: Tensor) -> Tensor:
    """Add the hidden units that the needed ones read; returns which inputs they read."""
    inputs = torch.zeros(layer.input_size, dtype=torch.bool, device=need.device)
    for block in reversed(_blocks(layer)):
        needed, quiet = need[block.number], silent[block.number]
        count = -1
        while count != (count := int(needed.sum())):
            needed |= _read(block.from_hidden[:, needed & ~quiet]) & ~quiet
        read = _read(block.from_inputs[:, needed & ~quiet])
        if block.below is None:
            inputs |= read
        else:
            need[block.below] |= read.view_as(need[block.below]) & ~silent[block.below]
    return inputs


def inputs_read(layer: nn.RNNBase) -> Tensor:
    """Which inputs have a weight."""
    reads = [_read(block.from_inputs) for block in _blocks(layer) if block.below is None]
    return torch.stack(reads).any(0)


def recurrent_with_inputs(layer: Any, inputs: Tensor) -> nn.RNNBase:
    """The layer with some of its inputs."""
    hidden = torch.ones(len(_blocks(layer)), layer.hidden_size, dtype=torch.bool)
    hidden = hidden.to(inputs.device)
    nothing = torch.full_like(inputs, torch.nan, dtype=layer.weight_ih_l0.dtype)
    return recurrent_with_units(layer, ~hidden, hidden, inputs, nothing)


def recurrent_with_units(
    layer: nn.RNNBase, silent: Tensor, need: Tensor, inputs: Tensor, constants: Tensor
) -> nn.RNNBase:
    """The layer with the hidden units that are needed, and silent ones to fill up its blocks.

    Args:
        inputs: Which inputs it keeps.
        constants: The value of every input that is constant, NaN for the others. Those that are
            not kept go into the biases.
    """
    size = max(int(need.sum(1).max()), 1)
    orders = [_order(n, s, size) for n, s in zip(need, silent, strict=True)]
    folded = ~inputs & ~constants.isnan()
    bias = layer.bias or bool(constants[folded].any())
    options = {"batch_first": layer.batch_first, "bidirectional": layer.bidirectional}
    kind: Any = type(layer)
    new = kind(int(inputs.sum()), size, layer.num_layers, bias, **options, device="meta")
    for block in _blocks(layer):
        order, input_bias = orders[block.number], block.input_bias
        from_inputs = _rows(block.from_inputs, order)
        if block.below is None:
            input_bias = input_bias + block.from_inputs[..., folded] @ constants[folded]
            from_inputs = from_inputs[..., inputs]
        else:
            below = orders[block.below]
            parts = from_inputs.chunk(len(below), -1)
            from_inputs = torch.cat([_columns(*pair) for pair in zip(parts, below, strict=True)], 2)
        values = {
            "weight_ih": from_inputs,
            "weight_hh": _columns(_rows(block.from_hidden, order), order),
            "bias_ih": _rows(input_bias, order),
            "bias_hh": _rows(block.hidden_bias, order),
        }
        for name, value in values.items():
            if bias or name.startswith("weight"):
                parameter = nn.Parameter(value.flatten(0, 1).contiguous(), requires_grad=False)
                setattr(new, f"{name}_{block.suffix}", parameter)
    new.flatten_parameters()
    return new.eval()


class _Block(NamedTuple):
    """One layer and direction; the first dimension of its tensors are the gates.

    Attributes:
        below: The blocks whose states it reads, None for the input of the whole.
    """

    number: int
    suffix: str
    below: slice | None
    from_inputs: Tensor
    from_hidden: Tensor
    input_bias: Tensor
    hidden_bias: Tensor


def _blocks(layer: nn.RNNBase) -> list[_Block]:
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    blocks: list[_Block] = []
    for index in range(layer.num_layers):
        first = len(blocks)
        below = slice(first - len(directions), first) if index else None
        for direction in directions:
            suffix = f"l{index}{direction}"
            weights = [getattr(layer, f"weight_{kind}_{suffix}").detach() for kind in ("ih", "hh")]
            if layer.bias:
                biases = [getattr(layer, f"bias_{kind}_{suffix}").detach() for kind in ("ih", "hh")]
            else:
                biases = [weights[0].new_zeros(len(weights[0]))] * 2
            gates = (t.unflatten(0, (-1, layer.hidden_size)) for t in (*weights, *biases))
            blocks.append(_Block(len(blocks), suffix, below, *gates))
    return blocks


def _read(weights: Tensor) -> Tensor:
    """(gates, units, inputs) -> which inputs have a weight."""
    return (weights != 0).flatten(0, 1).any(0)


def _order(need: Tensor, silent: Tensor, size: int) -> Tensor:
    """Places of the needed units; one past the end stands for a silent unit."""
    places = need.nonzero().flatten()
    places = torch.where(silent[places], len(need), places)
    return F.pad(places, (0, size - len(places)), value=len(need))


def _rows(gates: Tensor, order: Tensor) -> Tensor:
    """Some units of (gates, units, *), with zeros one past the end."""
    return torch.cat([gates, torch.zeros_like(gates[:, :1])], 1)[:, order]


def _columns(weights: Tensor, order: Tensor) -> Tensor:
    """The same of (gates, units, inputs) for its inputs."""
    return F.pad(weights, (0, 1))[..., order]
