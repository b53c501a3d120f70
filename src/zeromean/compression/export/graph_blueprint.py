"""The nodes of a graph as JSON.

Only known functions and methods of tensors are written and read: torch.fx makes Python code of the
nodes, so a file must not be able to say anything else.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx


def describe_nodes(graph: fx.Graph) -> list[list[Any]]:
    """What would build a graph."""
    return [_describe_node(node) for node in graph.nodes]


def build_graph(nodes: list[list[Any]], attributes: Collection[str]) -> fx.Graph:
    """The graph that was described, which may read these attributes of its module."""
    graph = fx.Graph()
    built: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs in nodes:
        arguments, options = _from_json(args, built), _from_json(kwargs, built)
        _require_names(op, target, options, attributes)
        if op == "call_function":
            target = _FUNCTIONS[target]
        built[name] = graph.create_node(op, target, arguments, options, name)
    return graph


def name_in(registry: Mapping[str, Any], value: Any) -> str:
    """The name under which a function or class is known."""
    for name, known in registry.items():
        if value is known:
            return name
    called = getattr(value, "__name__", str(value))
    raise ValueError(
        f"A file cannot describe {called}, which the forward function or a layer uses; save "
        "model.state_dict() and build the module in code."
    )


def _describe_node(node: fx.Node) -> list[Any]:
    target: Any = node.target
    if node.op == "call_function":
        target = name_in(_FUNCTIONS, target)
    elif node.op == "call_method" and target not in _METHODS:
        name_in({}, target)
    return [node.op, node.name, target, _to_json(node.args), _to_json(node.kwargs)]


def _require_names(
    op: str, target: str, options: dict[str, Any], attributes: Collection[str]
) -> None:
    """Refuse anything but names where torch.fx writes Python code with what stands in the file."""
    known = {
        "placeholder": lambda: _is_name(target.lstrip("*")),
        "get_attr": lambda: target in attributes and all(map(_is_name, target.split("."))),
        "call_module": lambda: re.fullmatch(r"\w+", target),
        "call_function": lambda: target in _FUNCTIONS,
        "call_method": lambda: target in _METHODS,
        "output": lambda: target == "output",
    }
    if not known[op]() or not all(map(_is_name, options)):
        raise ValueError(f"got {op} {target} with {list(options)}")


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _to_json(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if value is Ellipsis:
        return {"ellipsis": []}
    if isinstance(value, slice):
        return {"slice": [_to_json(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(v) for v in value]}
    if isinstance(value, list):
        return [_to_json(v) for v in value]
    if isinstance(value, dict):
        return {"dict": [[k, _to_json(v)] for k, v in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"A file cannot describe the argument {value!r} of a function.")


def _from_json(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_from_json(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "dict":
        return {k: _from_json(v, nodes) for k, v in content}
    items = [_from_json(v, nodes) for v in content]
    return {"slice": lambda: slice(*items), "tuple": lambda: tuple(items), "ellipsis": lambda: ...}[
        kind
    ]()


_FUNCTIONS: dict[str, Any] = {
    "add": operator.add,
    "iadd": operator.iadd,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "neg": operator.neg,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "getitem": operator.getitem,
    **{
        f"torch.{function.__name__}": function
        for function in (
            torch.abs,
            torch.add,
            torch.amax,
            torch.bmm,
            torch.cat,
            torch.chunk,
            torch.clamp,
            torch.concat,
            torch.div,
            torch.exp,
            torch.flatten,
            torch.log_softmax,
            torch.matmul,
            torch.mean,
            torch.mul,
            torch.movedim,
            torch.permute,
            torch.reshape,
            torch.softmax,
            torch.split,
            torch.square,
            torch.squeeze,
            torch.stack,
            torch.sub,
            torch.sum,
            torch.swapaxes,
            torch.transpose,
            torch.unbind,
            torch.unflatten,
            torch.unsqueeze,
        )
    },
    "F.softmax": F.softmax,
    "F.log_softmax": F.log_softmax,
    "F.interpolate": F.interpolate,
    "F.normalize": F.normalize,
    "F.pad": F.pad,
    "F.scaled_dot_product_attention": F.scaled_dot_product_attention,
}
_METHODS = {
    "abs",
    "add",
    "amax",
    "chunk",
    "clamp",
    "clone",
    "contiguous",
    "detach",
    "div",
    "exp",
    "expand",
    "flatten",
    "log_softmax",
    "matmul",
    "mean",
    "movedim",
    "mul",
    "neg",
    "permute",
    "pow",
    "reshape",
    "size",
    "softmax",
    "split",
    "square",
    "squeeze",
    "sub",
    "sum",
    "swapaxes",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
}
