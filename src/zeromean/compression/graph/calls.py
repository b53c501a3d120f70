"""Calls of functions and methods: their options, and the module that does the same."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx.node import map_arg

from zeromean.compression.graph.operations import operation_called


def module_for(node: fx.Node) -> nn.Module | None:
    """The module that does what the call of a function does, if one is known.

    It does not work in place.
    """
    if node.op not in ("call_function", "call_method"):
        return None  # Not a module or an input that has the name of a function.
    operation = operation_called(node.target)
    if operation is None or not operation.modules:
        return None
    options = options_of(node)
    options.pop("inplace", None)
    options.pop("input", None)
    computed: list[fx.Node] = []
    map_arg(options, computed.append)
    if computed:
        return None
    return (operation.build or operation.modules[0])(**options)


def options_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call but the first, by the names that a module has for them."""
    operation = operation_called(node.target) if node.op != "call_module" else None
    names = () if operation is None else operation.options
    return {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
