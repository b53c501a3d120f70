"""From a model to the graph of its modules, through torch.fx."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Collection
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx, nn

from zeromean.compression.graph import in_place
from zeromean.compression.graph.annotations import has_hooks
from zeromean.compression.graph.calls import module_for
from zeromean.compression.graph.network import Network
from zeromean.compression.graph.operations import IN_PLACE, role_of
from zeromean.compression.graph.roles import Role
from zeromean.compression.modules.adapters import RequireDim, SelectInputs
from zeromean.compression.modules.batch_last import BatchLast
from zeromean.compression.modules.sparse_layers import SparseConv2d, SparseLinear
from zeromean.layers.dropout.unit_noise import UnitScale
from zeromean.layers.plain_attention import PlainAttention
from zeromean.layers.stochastic_module import StochasticModule


def trace(model: nn.Module, given: Collection[str] = ()) -> Network:
    """The graph of a model in eval mode, with modules in place of known functions.

    Raises what torch.fx raises where a forward function depends on data, and ValueError where the
    graph would not show what happens: hooks of the model itself, and activations changed in place
    that are read elsewhere.

    Args:
        given: Names of the optional arguments that the graph takes; the others keep their defaults.
    """
    alone = is_leaf(model)
    if alone:
        model = nn.Sequential(model)
    if has_hooks(model):
        raise ValueError("the model has hooks of its own")
    module = fx.GraphModule(model, _graph_of(model, given))
    for node in module.graph.nodes:
        if in_place.changes_what_others_read(module, node):
            raise ValueError(f"{node} changes in place what something else reads too")
        node.target = IN_PLACE.get(node.target, node.target)
        if node.target is getattr and node.args[1] == "shape":
            node.op, node.target, node.args = "call_method", "size", node.args[:1]
    network = Network(module, {"0": ""} if alone else {})
    for node in network.nodes:
        same = module_for(node)
        if same is not None:
            network.replace_(node, same)
    for node in network.nodes:
        layer = network.layer(node)
        if layer is not None and role_of(layer) is Role.NOTHING and not has_hooks(layer):
            network.replace_(node, None)
    network.drop_unread_()
    return network


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one node of a graph; of others the graph shows what is inside."""
    holder = isinstance(module, (nn.ParameterDict, nn.ParameterList))  # These are never called.
    return not holder and _Tracer().is_leaf_module(module, "")


def why_untraced(error: Exception) -> str:
    """What stopped a trace, with the line of the model's code where it happened."""
    reason = str(error) or type(error).__name__
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    # The first is whoever called us.
    inside = [frame for frame in theirs if frame.name != "<module>" and frame is not frames[0]]
    if not inside:
        return reason
    line = inside[-1]
    return f"{reason}, in line {line.lineno} of {line.filename}: {line.line}"


def record_shapes_(network: Network, args: tuple, kwargs: dict[str, Any]) -> None:
    """Note the shape that the output of every node has for an example."""
    arguments = inspect.signature(network.module.forward).bind(*args, **kwargs)
    arguments.apply_defaults()
    _ShapeRecorder(network, arguments.kwargs).run(*arguments.args)


class _ShapeRecorder(fx.Interpreter):
    def __init__(self, network: Network, keywords: dict[str, Any]):
        super().__init__(network.module)
        self.network = network
        self.keywords = keywords

    def placeholder(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target.startswith("**"):
            return self.keywords
        return super().placeholder(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.network[n].shape = result.shape
        return result


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (StochasticModule, UnitScale, PlainAttention, *_COMPRESSED)):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _graph_of(model: nn.Module, given: Collection[str]) -> fx.Graph:
    """The graph, without the arguments that keep their defaults.

    As inputs of the graph they would not be what they are: `argument is None` would be false.
    """
    parameters = inspect.signature(model.forward).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in given and isinstance(parameter.default, (bool, int, float, str, NoneType))
    }
    graph = _Tracer().trace(model, concrete_args=defaults or None)
    for node in list(graph.nodes):
        # torch.fx asserts that they have their defaults, as inputs of names that end in a number.
        if node.op == "placeholder" and node.target.lstrip("*") not in parameters:
            _erase_with_users_(graph, node)
    return graph


def _erase_with_users_(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase_with_users_(graph, user)
    graph.erase_node(node)


def _method(function: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy(
        "call_function", function, (self, other), {}
    )


_COMPRESSED = (SparseLinear, SparseConv2d, BatchLast, SelectInputs, RequireDim)
# torch.fx takes x += y for x + y and does not show that it works in place.
_METHODS = {f"__{function.__name__}__": _method(function) for function in IN_PLACE}
_Proxy = type("_Proxy", (fx.Proxy,), _METHODS)
