"""torch's transformer layers with fewer hidden units between their two linear layers.

For a graph they are one node, so that what happens inside of them is done before it is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from zeromean.compression.graph.annotations import has_hooks
from zeromean.compression.plan import Decision, UnitsLeft
from zeromean.compression.rewrite.resize import with_units


def feed_forward_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The transformer layers whose hidden units can go, by their names."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            inside = module.linear1, module.linear2
            if all(type(layer) is nn.Linear for layer in inside):
                yield name, module


def narrow_blocks_(model: nn.Module) -> dict[str, Decision]:
    """Take out hidden units that nobody reads; returns what became of the layers."""
    decisions: dict[str, Decision] = {}
    for name, block in feed_forward_blocks(model):
        if has_hooks(block.linear1) or has_hooks(block.linear2):
            continue
        read = (block.linear2.weight != 0).any(0)
        read[0] |= not read.any()  # So that shapes stay whole.
        if not read.all():
            place = f"{name}." if name else ""
            decisions[f"{place}linear1"] = UnitsLeft(int((~read).sum()), len(read))
            everything = read.new_ones(block.linear2.out_features)
            block.linear1 = with_units(block.linear1, read)
            block.linear2 = with_units(block.linear2, everything, read)
    return decisions
