"""A pruned network made really smaller and faster: a plain module with the same predictions."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections import OrderedDict
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from zeromean.arguments import require_model
from zeromean.compression.analysis import analyse_, network_of, run_example
from zeromean.compression.graph.network import Network
from zeromean.compression.graph.trace import why_untraced
from zeromean.compression.inventory import layers_of, loose_parameters, sizes_of
from zeromean.compression.plan import Decision, Plan, PlannedLayer, Reason, leave_plan_
from zeromean.compression.rewrite.heads import narrow_heads_
from zeromean.compression.rewrite.narrow import narrow_attention_, narrow_blocks_
from zeromean.compression.rewrite.remove import remove_units_
from zeromean.compression.rewrite.sparsify import choose_layers_, join_chains_, sparse_twin
from zeromean.compression.sparsity import sparsity
from zeromean.conversion.to_deterministic import to_deterministic
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.dropout.input_noise import fold_input_noise_, take_input_noise_
from zeromean.layers.dropout.unit_noise import UnitNoise
from zeromean.layers.lora import merge_adapters_
from zeromean.layers.stochastic_layer import stochastic_layers
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.layers.surgery import copy_with_masks, replace_modules_
from zeromean.prediction.inputs import Inputs, as_arguments


@torch.inference_mode(False)
@torch.no_grad()
def compress(model: nn.Module, example_inputs: Inputs | None = None) -> nn.Module:
    """A plain module that predicts what the pruned model predicts with its means, but is smaller.

    Layers that predict by their means become plain ones; variance layers stay stochastic, shrunk,
    with the same distribution of outputs. Units that are constant are removed, and what they
    contribute goes into the biases behind them; so are units that nobody reads, also the hidden
    ones of LSTM and GRU. BatchNorm and noise on units go into the weights. Linear layers in which
    at most 1/16 of the weights is left, and convolutions of 2-d images with at most half, are
    multiplied sparsely. Masks of `torch.nn.utils.prune`, and zeros in deterministic layers, count
    as pruned. `zm.compression_report` says what has become of every layer.

    The result is for prediction: BatchNorm has its running statistics, Dropout is gone and the
    parameters ask for no gradient. Where a forward function depends on data, so that torch.fx
    cannot trace it, a warning says so and layers are compressed one by one, without removing units.

    Args:
        model: A pruned model; it is left as it is.
        example_inputs: Inputs on which the result is compared with the model, a tensor, a tuple of
            positional or a mapping of keyword arguments, by which the result can be called then
            too. Their shapes tell what a forward function leaves open. Optional arguments of
            forward that are not given here keep their defaults.
    """
    require_model(model)
    _refuse_unpruned(model)
    expected = None if example_inputs is None else run_example(model, example_inputs)
    compressed, plan = compressed_with_plan(model, example_inputs)
    if plan.untraced:
        warnings.warn(
            f"torch.fx cannot trace the model ({plan.untraced}), so that its layers are compressed "
            "one by one and no units are removed; keep decisions that depend on data out of "
            "forward().",
            stacklevel=2,
        )
    leave_plan_(compressed, plan)
    if example_inputs is not None:
        _compare(model, compressed, example_inputs, expected)
    return compressed


def compressed_with_plan(model: nn.Module, example_inputs: Inputs | None) -> tuple[nn.Module, Plan]:
    """The compressed network, which does not carry its plan yet, and the plan."""
    plain = plain_copy(model)
    narrowed = narrow_blocks_(plain)
    try:
        network = network_of(plain, example_inputs)
    except Exception as error:
        untraced = why_untraced(error)
        compressed = _layer_by_layer(plain)
        plan = _plan_without_graph(model, untraced, narrowed)
    else:
        found = analyse_(network, example_inputs)
        remove_units_(network, found.units, found.needs)
        narrow_attention_(network)
        narrow_heads_(network, example_inputs)
        choose_layers_(network)
        join_chains_(network)
        compressed, plan = _rebuilt(model, network, example_inputs, narrowed)
    return compressed.eval().requires_grad_(False), plan


@torch.inference_mode(False)
@torch.no_grad()
def trimmed_with_plan(
    model: nn.Module, example_inputs: Inputs | None = None
) -> tuple[nn.Module, Plan]:
    """A network without the units that pruning took, to be trained on: BatchNorm is still there.

    Raises what tracing the model raises.
    """
    plain = plain_copy(model)
    narrowed = narrow_blocks_(plain)
    network = network_of(plain, example_inputs)
    found = analyse_(network, example_inputs, fold=False)
    remove_units_(network, found.units, found.needs)
    narrow_attention_(network)
    narrow_heads_(network, example_inputs)
    trimmed, plan = _rebuilt(model, network, example_inputs, narrowed)
    return trimmed.train().requires_grad_(True), plan


@torch.inference_mode(False)
@torch.no_grad()
def units_left(model: nn.Module, example_inputs: Inputs | None = None) -> dict[str, Tensor]:
    """Which units of its layers a pruned network needs, by name: what `trimmed_with_plan` keeps.

    Raises what tracing the model raises.
    """
    network = network_of(plain_copy(model), example_inputs)
    needs = analyse_(network, example_inputs, fold=False).needs
    return {
        network.layer_name(node): units
        for node, units in needs.units.items()
        if node.op == "call_module"
    }


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode, with plain layers in place of all stochastic ones that have means."""
    model = copy_with_masks(model).eval()
    input_noise = take_input_noise_(model)
    plain: dict[nn.Module, nn.Module] = {
        module: to_deterministic(module)
        for module in stochastic_modules(model).values()
        if all(p.has_mean for p in module.modules() if isinstance(p, Posterior))
    }
    model = merge_adapters_(replace_modules_(model, plain)).eval()
    for layer in stochastic_layers(model).values():
        # A variance layer stays random; its bias, if that is too, becomes its mean.
        if isinstance(layer.bias, Posterior):
            mean = layer.bias.mean_weight()
            mean = torch.zeros(layer.bias.shape) if mean is None else mean.detach().clone()
            del layer.bias
            layer.bias = nn.Parameter(mean.to(layer.weight.device, layer.weight.dtype))
    fold_input_noise_(model, input_noise)
    return model


def _rebuilt(
    model: nn.Module,
    network: Network,
    example_inputs: Inputs | None,
    narrowed: Mapping[str, Decision],
) -> tuple[nn.Module, Plan]:
    """The network as modules, and what was decided about the model."""
    read = {str(node.target) for node in network.read_by_forward}
    rebuilt, places = _simplest(network, by_keyword=isinstance(example_inputs, Mapping))
    return rebuilt, _plan(model, network.decisions, places, read, narrowed)


def _refuse_unpruned(model: nn.Module) -> None:
    noises = [module for module in model.modules() if isinstance(module, UnitNoise)]
    total = sparsity(model).total
    if total.kept == total.weights and all(noise.keep.all() for noise in noises):
        raise ValueError(
            "The model has no pruned weights, so that there is nothing to compress; call "
            "zm.prune_(model) first (by='variance' for variance layers), or, where layers have "
            "means, zm.to_deterministic(model) for a plain copy."
        )


def _layer_by_layer(model: nn.Module) -> nn.Module:
    # torch's fused transformer layer reads the weights of its linear layers itself.
    read = {
        child
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        for child in module.children()
    }
    twins = {module: sparse_twin(module) for module in model.modules() if module not in read}
    replacements = {module: twin for module, twin in twins.items() if twin is not module}
    return replace_modules_(model, replacements)


def _simplest(network: Network, *, by_keyword: bool) -> tuple[nn.Module, dict[str, str]]:
    """One module or nn.Sequential where the graph is no more than that, and where its layers are.

    Args:
        by_keyword: Whether the inputs come by their names, which only a graph has.
    """
    modules: dict[str, nn.Module] = {}
    calls = [node for node in network.nodes if node.op == "call_module"]
    for node in calls:
        # In the order of the graph, under the names that the layers had.
        known = network[node]
        while known.name in modules and modules[known.name] is not known.layer:
            known.name += "_"
        modules[known.name] = known.layer
    if _is_chain(network) and not by_keyword:
        if len(modules) == 1:
            return next(iter(modules.values())), network[calls[0]].places
        return nn.Sequential(OrderedDict(modules)), _places(network, calls)
    for node in calls:
        node.target = network[node].name
    attributes: dict[str, Any] = {}
    for node in network.read_by_forward:
        # Under a name of its own: the layer that it belongs to may have another one by now.
        value = operator.attrgetter(str(node.target))(network.module)
        name = str(node.target).replace(".", "_")
        while name in modules or attributes.get(name, value) is not value:
            name += "_"
        attributes[name] = value
        node.target = name
    graph = fx.GraphModule({**modules, **attributes}, network.module.graph)
    return graph, _places(network, calls)


def _places(network: Network, calls: list[fx.Node]) -> dict[str, str]:
    """The layers of the model, and their paths among modules that have the names of calls."""
    places: dict[str, str] = {}
    for node in calls:
        for layer, inside in network[node].places.items():
            places.setdefault(layer, _path(network[node].name, inside))
    return places


def _is_chain(network: Network) -> bool:
    """Whether one input goes through modules, each called once, to the output."""
    source, *calls, end = network.nodes
    for node in calls:
        if node.op != "call_module" or node.args != (source,) or node.kwargs:
            return False
        if network[node].called_again:
            return False
        source = node
    return end.args == (source,)


def _plan(
    model: nn.Module,
    decisions: Mapping[str, Decision | None],
    places: Mapping[str, str],
    read: Container[str],
    narrowed: Mapping[str, Decision],
) -> Plan:
    layers: dict[str, PlannedLayer] = {}
    for name, layer in layers_of(model).items():
        # A part of a layer, such as the projection of attention, goes where that goes.
        above, inside = name, ""
        while above and above not in decisions:
            above, _, last = above.rpartition(".")
            inside = _path(last, inside)
        decision = narrowed.get(name) or decisions.get(above, Reason.NOT_CALLED)
        place = _path(places[above], inside) if above in places else None
        layers[name] = PlannedLayer(sizes_of(layer), place, decision)
    parameters = {
        name: Reason.UNCHANGED if name in read else Reason.NOT_READ
        for name in loose_parameters(model)
    }
    return Plan(layers, parameters)


def _plan_without_graph(model: nn.Module, untraced: str, narrowed: Mapping[str, Decision]) -> Plan:
    sizes = {name: sizes_of(layer) for name, layer in layers_of(model).items()}
    layers = {n: PlannedLayer(size, n, narrowed.get(n)) for n, size in sizes.items()}
    parameters = dict.fromkeys(loose_parameters(model), Reason.UNCHANGED)
    return Plan(layers, parameters, untraced)


def _path(*names: str) -> str:
    return ".".join(name for name in names if name)


def _compare(model: nn.Module, compressed: nn.Module, inputs: Inputs, expected: Any) -> None:
    """Raise unless both predict the same; not where a variance layer draws."""
    if stochastic_modules(compressed):
        return
    args, kwargs = as_arguments(inputs)
    try:
        outputs = compressed(*args, **kwargs)
        rounding = 16 * _precision(model)
        torch.testing.assert_close(
            _as_mapping(outputs),
            _as_mapping(expected),
            rtol=max(1e-4, rounding),
            atol=max(1e-5, rounding),
        )
    except AssertionError as error:
        raise RuntimeError(
            f"The compressed model predicts something else than the model on example_inputs; "
            f"please report this. {error}"
        ) from error


def _as_mapping(output: Any) -> Any:
    """The output with dictionaries in place of dataclasses, which cannot be compared."""
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return output


def _precision(model: nn.Module) -> float:
    """The largest relative rounding error of a parameter."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)
