"""The architecture of a compressed network as JSON, with the tensors beside it.

Only known kinds of modules and functions are written and read, so that a file can say what to
build but not what to run.
"""

from __future__ import annotations

import inspect
import keyword
import operator
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from zeromean.compression.batch_last import BatchLast
from zeromean.compression.graph import POINTWISE, has_hooks
from zeromean.compression.resizing import resized
from zeromean.compression.sparse_layers import SelectInputs, SparseConv2d, SparseLinear
from zeromean.convolutions import Conv1d, Conv2d, Conv3d, ConvTranspose2d
from zeromean.dropout import UnitScale
from zeromean.layers import Linear, StochasticLayer
from zeromean.noise import NOISES
from zeromean.posteriors import ZeroMean
from zeromean.samplers import SAMPLERS

Tensors = dict[str, Tensor]


def describe(module: nn.Module, prefix: str = "") -> tuple[dict[str, Any], Tensors]:
    """What would build a module, and its tensors under the names that start with the prefix."""
    kind = type(module)
    if has_hooks(module):
        raise ValueError(
            f"A file cannot describe the hooks of {kind.__name__}; remove them, or save "
            "model.state_dict() and build the module in code."
        )
    blueprint: dict[str, Any]
    if isinstance(module, fx.GraphModule):
        children = _children(module)
        blueprint = {"kind": "Graph", "nodes": [_describe_node(n) for n in module.graph.nodes]}
    elif kind in _CONTAINERS.values():
        children = dict(module.named_children())
        blueprint = {"kind": _name(kind, _CONTAINERS)}
    elif kind in _VARIANCE_LAYERS.values():
        return _describe_variance_layer(module, prefix)
    elif kind in _LAYERS.values():
        blueprint, tensors = _describe_layer(module)
        return blueprint, {prefix + name: tensor for name, tensor in tensors.items()}
    else:
        raise ValueError(
            f"A file cannot describe {kind.__name__}: it holds torch's usual layers and what "
            "zm.compress makes of them; save model.state_dict() and build the module in code."
        )
    blueprint["modules"] = {}
    tensors: Tensors = {}
    for name, child in children.items():
        blueprint["modules"][name], below = describe(child, f"{prefix}{name}.")
        tensors |= below
    return blueprint, tensors


def build(blueprint: dict[str, Any], tensors: Tensors, prefix: str = "") -> nn.Module:
    """The module that a blueprint describes."""
    kind = blueprint["kind"]
    if kind in _CONTAINERS or kind == "Graph":
        modules = {
            name: build(child, tensors, f"{prefix}{name}.")
            for name, child in blueprint["modules"].items()
        }
        if kind == "Graph":
            return fx.GraphModule(modules, _build_graph(blueprint["nodes"]))
        if kind == "BatchLast":
            return BatchLast(*modules.values())
        container = nn.Sequential()
        for name, module in modules.items():
            container.add_module(name, module)
        return container
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    }
    return _build_layer(kind, blueprint.get("arguments", {}), own)


def _describe_layer(module: Any) -> tuple[dict[str, Any], Tensors]:
    kind = type(module)
    if isinstance(module, (SparseLinear, SparseConv2d)):
        blueprint, tensors = _describe_layer(module.dense())
        blueprint["kind"] = kind.__name__
        return blueprint, tensors
    tensors = {n: t for n, t in module.state_dict().items() if n != "num_batches_tracked"}
    blueprint: dict[str, Any] = {"kind": _name(kind, _LAYERS)}
    if kind in (SelectInputs, UnitScale):
        return blueprint, tensors
    if isinstance(module, nn.RNNBase):  # Its signature says *args.
        return {**blueprint, "arguments": {n: getattr(module, n) for n in _RECURRENT}}, tensors
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in ("device", "dtype") or name.startswith("_") or parameter.kind > 1:
            continue
        value = getattr(module, name)
        value = value is not None if name == "bias" else value
        if value != parameter.default:
            arguments[name] = value
    return {**blueprint, "arguments": arguments}, tensors


def _describe_variance_layer(layer: Any, prefix: str) -> tuple[dict[str, Any], Tensors]:
    if layer.weight.has_mean:
        raise ValueError(
            "A compressed file holds variance layers, but a stochastic layer here has means; "
            "compress the model first, or use zm.save."
        )
    blueprint, _ = _describe_layer(layer.plain_twin())
    blueprint["kind"] = _name(type(layer), _VARIANCE_LAYERS)
    blueprint["arguments"]["noise"] = _name(layer.weight.noise, NOISES)
    blueprint["arguments"]["sampler"] = _name(layer.sampler, SAMPLERS)
    tensors = {"weight": layer.weight.mean_and_scale()[1].detach(), "bias": layer.bias}
    return blueprint, {prefix + n: t.detach() for n, t in tensors.items() if t is not None}


def _build_layer(kind: str, arguments: dict[str, Any], tensors: Tensors) -> nn.Module:
    if kind == "SelectInputs":
        return SelectInputs(tensors["indices"])
    if kind == "UnitScale":
        return UnitScale(tensors["scale"])
    arguments = {n: tuple(v) if isinstance(v, list) else v for n, v in arguments.items()}
    noise, sampler = arguments.pop("noise", None), arguments.pop("sampler", None)
    plain = {"SparseLinear": nn.Linear, "SparseConv2d": nn.Conv2d}
    with torch.device("meta"):
        if kind in _VARIANCE_LAYERS:
            posterior = _zero_mean_with(NOISES[noise])
            layer: Any = _VARIANCE_LAYERS[kind](
                **arguments, posterior=posterior, prior=None, sampler=SAMPLERS[sampler]
            )
        else:
            layer = plain.get(kind, _LAYERS[kind])(**arguments)
    if isinstance(layer, StochasticLayer):
        return resized(layer, tensors["weight"], tensors.get("bias"))
    if "num_batches_tracked" in layer.state_dict():
        tensors = {**tensors, "num_batches_tracked": torch.zeros((), dtype=torch.int64)}
    layer.load_state_dict(tensors, assign=True)
    if kind == "SparseLinear":
        return SparseLinear(layer.weight, layer.bias)
    return SparseConv2d(layer) if kind == "SparseConv2d" else layer


def _zero_mean_with(noise: Any) -> Any:
    return lambda shape, **options: ZeroMean(shape, noise=noise, **options)


def _children(network: fx.GraphModule) -> dict[str, nn.Module]:
    called = [n.target for n in network.graph.nodes if n.op == "call_module"]
    return {str(name): network.get_submodule(str(name)) for name in called}


def _describe_node(node: fx.Node) -> list[Any]:
    target: Any = node.target
    if node.op == "get_attr":
        raise ValueError(
            f"A file cannot describe a network whose forward function reads the attribute {target}."
        )
    if node.op == "call_function":
        target = _name(target, _FUNCTIONS)
    elif node.op == "call_method" and target not in _METHODS:
        _name(target, {})
    return [node.op, node.name, target, _to_json(node.args), _to_json(node.kwargs)]


def _build_graph(nodes: list[list[Any]]) -> fx.Graph:
    graph = fx.Graph()
    built: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs in nodes:
        arguments, options = _from_json(args, built), _from_json(kwargs, built)
        _require_names(op, target, options)
        if op == "call_function":
            target = _FUNCTIONS[target]
        built[name] = graph.create_node(op, target, arguments, options, name)
    return graph


def _require_names(op: str, target: str, options: dict[str, Any]) -> None:
    """Refuse anything but names where torch.fx writes Python code with what stands in the file."""
    known = {
        "placeholder": lambda: _is_name(target.lstrip("*")),
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
    return {"slice": lambda: slice(*items), "tuple": lambda: tuple(items)}[kind]()


def _name(value: Any, registry: dict[str, Any]) -> str:
    for name, known in registry.items():
        if value is known:
            return name
    called = getattr(value, "__name__", str(value))
    raise ValueError(
        f"A file cannot describe {called}, which the forward function or a layer uses; save "
        "model.state_dict() and build the module in code."
    )


_CONTAINERS: dict[str, Any] = {"Sequential": nn.Sequential, "BatchLast": BatchLast}
_VARIANCE_LAYERS: dict[str, Any] = {
    f"zeromean.{layer.__name__}": layer
    for layer in (Linear, Conv1d, Conv2d, Conv3d, ConvTranspose2d)
}
_LAYERS: dict[str, Any] = {
    layer.__name__: layer
    for layer in (
        *sorted(POINTWISE, key=lambda kind: kind.__name__),
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        nn.Embedding,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.LayerNorm,
        nn.GroupNorm,
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
        nn.AvgPool1d,
        nn.AvgPool2d,
        nn.AvgPool3d,
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d,
        nn.AdaptiveAvgPool3d,
        nn.AdaptiveMaxPool2d,
        nn.Upsample,
        nn.Flatten,
        nn.Unflatten,
        nn.Softmax,
        nn.LogSoftmax,
        nn.PReLU,
        nn.LSTM,
        nn.GRU,
        SparseLinear,
        SparseConv2d,
        SelectInputs,
        UnitScale,
    )
}
_RECURRENT = (
    "input_size",
    "hidden_size",
    "num_layers",
    "bias",
    "batch_first",
    "dropout",
    "bidirectional",
)
_FUNCTIONS: dict[str, Any] = {
    "add": operator.add,
    "iadd": operator.iadd,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "getitem": operator.getitem,
    "torch.add": torch.add,
    "torch.mul": torch.mul,
    "torch.cat": torch.cat,
    "torch.stack": torch.stack,
    "torch.flatten": torch.flatten,
    "torch.mean": torch.mean,
    "torch.softmax": torch.softmax,
    "F.softmax": F.softmax,
    "F.log_softmax": F.log_softmax,
    "F.interpolate": F.interpolate,
    "F.pad": F.pad,
}
_METHODS = {
    "add",
    "chunk",
    "flatten",
    "mean",
    "mul",
    "permute",
    "reshape",
    "size",
    "softmax",
    "squeeze",
    "sum",
    "transpose",
    "unsqueeze",
    "view",
}
