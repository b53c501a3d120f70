"""Noise on the units of a network that has none, without a change of its forward function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from zeromean.arguments import require_model, require_numbers, require_predicate
from zeromean.compression.analysis import network_of, run_example, units_of_
from zeromean.compression.compress import plain_copy
from zeromean.compression.graph.network import Network
from zeromean.compression.graph.trace import why_untraced
from zeromean.compression.hidden_units import NamedGroup, hidden_groups
from zeromean.compression.units.groups import unit_groups
from zeromean.conversion.make_stochastic import Predicate
from zeromean.layers.dropout.hidden_noise import HiddenNoise, attach_hidden_
from zeromean.layers.dropout.input_noise import InputNoise, attach_, input_noises
from zeromean.layers.dropout.log_normal import LogNormalDropout
from zeromean.layers.plain_attention import call_output_layers_
from zeromean.prediction.inputs import Inputs
from zeromean.text_table import text_table

# Noise of 5% of each unit at the start: predictions stay what they are.
_LOG_SCALE = -3.0


@dataclass(frozen=True)
class NoisyUnits:
    """Units that have noise now: those of one row of a `UnitNoiseReport`.

    Attributes:
        units: How many there are; each is removed from all these layers or from none.
        makers: Names of the layers that make them.
        readers: Names of the layers that read them, which have the noise.
        kl_weight: Factor of their KL term.
    """

    units: int
    makers: tuple[str, ...]
    readers: tuple[str, ...]
    kl_weight: float


@dataclass(frozen=True)
class UnitNoiseReport:
    """What `zm.add_unit_noise_` did; `print` shows it as a table.

    Attributes:
        groups: The units that have noise now.
        left: Names of the layers whose units stay, and why.
    """

    groups: tuple[NoisyUnits, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        rows = [("units", "made by", "read by", "weight of KL")]
        rows += [
            (f"{g.units:,}", ", ".join(g.makers), ", ".join(g.readers), f"{g.kl_weight:.3g}")
            for g in self.groups
        ]
        lines = text_table(rows, left=(1, 2))
        return "\n".join([*lines, *(f"left {name}: {why}" for name, why in self.left.items())])


def add_unit_noise_(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    kl_weight: float | Literal["cost"] = "cost",
    where: Predicate | None = None,
) -> UnitNoiseReport:
    """Give neurons and filters log-normal noise, in place; the forward function stays as it is.

    Trained with the KL term, the noise drowns the units that the network can do without;
    `zm.prune_` drops them and `zm.compress` leaves plain layers with fewer units. Units that must
    go together (of a residual stream, in concatenations, through depthwise convolutions) share
    their noise. The hidden units of torch's transformer layers and the heads of attention have some
    too, and so have the units of LSTM and GRU, which read their own with one draw for a call. Each
    layer that reads
    such units multiplies its input by it, in a hook: it stays the layer that it is, its weights
    keep their names, and its noise stands under `unit_noise` in it.

    Units stay where something needs all of them: the output, LayerNorm, functions that nothing is
    known of, layers that are called twice. The report says what.

    Args:
        example_inputs: Inputs of the model, a tensor, a tuple of positional or a mapping of keyword
            arguments.
        kl_weight: Factor of the KL term of all units; "cost": the square root of the
            multiplications that go with a unit of a group, in parts of its mean over all units.
        where: Predicate of name and layer that selects the layers whose units get noise.
    """
    require_model(model)
    require_predicate(where)
    if kl_weight != "cost":
        require_numbers(kl_weight=kl_weight)
    if input_noises(model):
        raise ValueError(
            "The model has noise on its units already; go on training it, or start from a copy "
            "that has none."
        )
    run_example(model, example_inputs)
    groups, left = _groups(model, example_inputs, where)
    if not groups:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items())
        raise ValueError(f"No units can be removed ({reasons or 'no layer makes any'}).")
    call_output_layers_(model, {name for group in groups for name in group.readers})
    rows = []
    for group, weight in zip(groups, _kl_weights(groups, kl_weight), strict=True):
        names = dict.fromkeys((*group.readers, *group.hidden))
        layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
        like = next(next(layer.parameters()) for layer in layers.values())
        noise = LogNormalDropout(
            len(group.cost),
            log_scale=_LOG_SCALE,
            kl_weight=weight,
            device=like.device,
            dtype=like.dtype,
        )
        noise.train(model.training)
        for name, index in group.readers.items():
            last = not hasattr(layers[name], "kernel_size")
            attach_(layers[name], InputNoise(noise, index.to(like.device), last))
        for name, index in group.hidden.items():
            attach_hidden_(layers[name], HiddenNoise(noise, index.to(like.device)))
        rows.append(NoisyUnits(len(group.cost), group.makers, tuple(names), weight))
    return UnitNoiseReport(tuple(rows), left)


def _groups(
    model: nn.Module, example_inputs: Inputs, where: Predicate | None
) -> tuple[list[NamedGroup], dict[str, str]]:
    """The groups to put noise on, and why the units of other layers stay."""
    plain = plain_copy(model)
    try:
        network = network_of(plain, example_inputs)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace the model, so that nothing is known of its units: "
            f"{why_untraced(error)}; keep decisions that depend on data out of forward()."
        ) from error
    with torch.no_grad():
        grouping = unit_groups(network, units_of_(network, example_inputs))
    left = {
        network.layer_name(node): f"all its units are needed by {_named(network, reader)}"
        for node, reader in grouping.stuck.items()
    }
    found = [
        NamedGroup(
            tuple(dict.fromkeys(network.layer_name(node) for node in group.makers)),
            {network.layer_name(node): index for node, index in group.readers.items()},
            group.cost,
            {network.layer_name(node): index for node, index in group.hidden.items()},
        )
        for group in grouping.groups
    ]
    groups = []
    for group in [*found, *hidden_groups(plain, network, example_inputs)]:
        unwanted = [n for n in group.makers if where and not where(n, model.get_submodule(n))]
        if unwanted:
            left |= dict.fromkeys(group.makers, f"{unwanted[0]} is not selected")
        else:
            groups.append(group)
            left = {name: why for name, why in left.items() if name not in group.makers}
    return groups, left


def _named(network: Network, node: fx.Node) -> str:
    if node.op == "output":
        return "the output"
    if node.op == "call_module":
        return f"{network.layer_name(node)} ({type(network.layer(node)).__name__})"
    return f"{getattr(node.target, '__name__', node.target)}()"


def _kl_weights(groups: list[NamedGroup], kl_weight: float | str) -> list[float]:
    if not isinstance(kl_weight, str):
        return [float(kl_weight)] * len(groups)
    roots = [float(group.cost.clamp_min(1.0).mean().sqrt()) for group in groups]
    units = [len(group.cost) for group in groups]
    mean = sum(r * n for r, n in zip(roots, units, strict=True)) / sum(units)
    return [root / mean for root in roots]
