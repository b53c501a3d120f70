"""The architecture of a compressed network as JSON, which stands next to the tensors in a file.

Only known kinds of modules and functions are written and read, so that a file can say what to
build but not what to run. The graphs of forward functions are in `graph_blueprint.py`.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from zeromean.compression.export.graph_blueprint import build_graph, describe_nodes, name_in
from zeromean.compression.export.transformer_blueprint import (
    KINDS,
    build_transformer,
    parts_of,
    settings_of,
)
from zeromean.compression.graph.annotations import has_hooks
from zeromean.compression.graph.operations import OPERATIONS
from zeromean.compression.modules.adapters import RequireDim, SelectInputs
from zeromean.compression.modules.batch_last import BatchLast
from zeromean.compression.modules.sparse_layers import SparseConv2d, SparseLinear
from zeromean.compression.rewrite.resize import resized
from zeromean.distributions.posteriors.factorized import independent
from zeromean.distributions.posteriors.zero_mean import ZeroMean
from zeromean.layers.dropout.unit_noise import UnitScale
from zeromean.layers.stochastic_layer import StochasticLayer
from zeromean.registry import LAYERS, NOISES, SAMPLERS

Tensors = dict[str, Tensor]
# In front of the names of layers with a random weight.
_VARIANCE = "zeromean."


def describe(module: nn.Module, prefix: str = "") -> tuple[dict[str, Any], Tensors]:
    """What would build a module, and its tensors under the names that start with the prefix."""
    kind = type(module)
    tensors: Tensors = {}
    if has_hooks(module):
        raise ValueError(
            f"A file cannot describe the hooks of {kind.__name__}; remove them, or save "
            "model.state_dict() and build the module in code."
        )
    blueprint: dict[str, Any]
    if isinstance(module, fx.GraphModule):
        children = _children(module)
        blueprint = {"kind": "Graph", "nodes": describe_nodes(module.graph)}
        tensors = {prefix + name: tensor for name, tensor in _attributes(module).items()}
        blueprint |= {"attributes": sorted(_attributes(module))} if tensors else {}
    elif kind in _CONTAINERS.values():
        children: Any = module._modules  # Also those that come twice.
        blueprint = {"kind": name_in(_CONTAINERS, kind)}
    elif kind in KINDS:
        children, tensors = parts_of(module), _tensors_of_transformer(module, prefix)
        blueprint = {"kind": KINDS[kind], "arguments": settings_of(module)}
    elif isinstance(module, StochasticLayer) and LAYERS.name_of(kind):
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
    for name, child in children.items():
        blueprint["modules"][name], below = describe(child, f"{prefix}{name}.")
        tensors |= below
    return blueprint, tensors


def build(blueprint: dict[str, Any], tensors: Tensors, prefix: str = "") -> nn.Module:
    """The module that a blueprint describes."""
    kind = blueprint["kind"]
    modules = {
        name: build(child, tensors, f"{prefix}{name}.")
        for name, child in blueprint.get("modules", {}).items()
    }
    if kind in KINDS.values():
        below = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        return build_transformer(kind, blueprint["arguments"], modules, {} if modules else below)
    if kind in _CONTAINERS or kind == "Graph":
        if kind == "Graph":
            attributes = {name: tensors[prefix + name] for name in blueprint.get("attributes", [])}
            graph = build_graph(blueprint["nodes"], attributes)
            return fx.GraphModule({**modules, **attributes}, graph)
        if kind == "BatchLast":
            return BatchLast(modules)
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


def stored_tensors(module: nn.Module) -> Tensors:
    """What a file holds of a module, without its children; of a variance layer, its scale."""
    if isinstance(module, (SparseLinear, SparseConv2d)):
        return stored_tensors(module.dense())
    tensors: dict[str, Tensor | None] = dict(module._parameters)
    left_out = {"num_batches_tracked", *module._non_persistent_buffers_set}
    tensors |= {n: t for n, t in module._buffers.items() if n not in left_out}
    if isinstance(module, StochasticLayer):
        tensors["weight"] = independent(module.weight, "A file").mean_and_scale()[1]
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}


def _tensors_of_transformer(module: nn.Module, prefix: str) -> Tensors:
    """Of attention, all there are; other kinds leave theirs to their parts."""
    if parts_of(module):
        return {}
    return {prefix + name: tensor.detach() for name, tensor in module.state_dict().items()}


def _describe_layer(module: Any) -> tuple[dict[str, Any], Tensors]:
    kind = type(module)
    tensors = stored_tensors(module)
    if isinstance(module, (SparseLinear, SparseConv2d)):
        blueprint, _ = _describe_layer(module.dense())
        blueprint["kind"] = kind.__name__
        return blueprint, tensors
    blueprint: dict[str, Any] = {"kind": name_in(_LAYERS, kind)}
    if kind is SelectInputs:
        return {**blueprint, "arguments": {"in_features": module.in_features}}, tensors
    if kind is UnitScale:
        return blueprint, tensors
    if isinstance(module, nn.RNNBase):  # Its signature says *args.
        return {**blueprint, "arguments": {n: getattr(module, n) for n in _RECURRENT}}, tensors
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in ("device", "dtype") or name.startswith("_") or parameter.kind > 1:
            continue
        if not hasattr(module, name):  # Deprecated names of others (Hardtanh).
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
    blueprint["kind"] = _VARIANCE + name_in(LAYERS, type(layer))
    blueprint["arguments"]["noise"] = name_in(NOISES, layer.weight.noise)
    blueprint["arguments"]["sampler"] = name_in(SAMPLERS, layer.sampler)
    return blueprint, {prefix + name: tensor for name, tensor in stored_tensors(layer).items()}


def _build_layer(kind: str, arguments: dict[str, Any], tensors: Tensors) -> nn.Module:
    if kind == "SelectInputs":
        return SelectInputs(tensors["indices"], arguments["in_features"])
    if kind == "UnitScale":
        return UnitScale(tensors["scale"])
    arguments = {n: tuple(v) if isinstance(v, list) else v for n, v in arguments.items()}
    noise, sampler = arguments.pop("noise", None), arguments.pop("sampler", None)
    if arguments.get("num_layers", 0) > len(tensors):  # It would build them before it compares.
        raise ValueError(f"got {len(tensors)} tensors for {arguments['num_layers']} layers")
    plain = {"SparseLinear": nn.Linear, "SparseConv2d": nn.Conv2d}
    with torch.device("meta"):
        if kind.startswith(_VARIANCE):
            posterior = _zero_mean_with(NOISES[noise])
            layer: Any = LAYERS[kind.removeprefix(_VARIANCE)](
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


def _attributes(network: fx.GraphModule) -> Tensors:
    """The tensors that the forward function reads itself."""
    names = [str(node.target) for node in network.graph.nodes if node.op == "get_attr"]
    return {name: operator.attrgetter(name)(network).detach() for name in names}


def _children(network: fx.GraphModule) -> dict[str, nn.Module]:
    called = [n.target for n in network.graph.nodes if n.op == "call_module"]
    return {str(name): network.get_submodule(str(name)) for name in called}


_CONTAINERS: dict[str, Any] = {"Sequential": nn.Sequential, "BatchLast": BatchLast}
_LAYERS: dict[str, Any] = {
    layer.__name__: layer
    for layer in (
        *(kind for o in OPERATIONS if not o.subclasses for kind in o.modules),
        # What compress leaves as it is, and what it makes.
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.InstanceNorm1d,
        nn.InstanceNorm2d,
        nn.InstanceNorm3d,
        nn.LayerNorm,
        nn.RMSNorm,
        nn.GroupNorm,
        nn.PixelShuffle,
        nn.ZeroPad2d,
        nn.ReflectionPad2d,
        nn.ReplicationPad2d,
        nn.Flatten,
        nn.Softmax,
        nn.LogSoftmax,
        SparseLinear,
        SparseConv2d,
        SelectInputs,
        RequireDim,
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
