"""What `zm.compress` has made of every layer, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from zeromean.arguments import require_model
from zeromean.compression.analysis import Analysis, analyse, graph_of, run_example
from zeromean.compression.compress import plain_copy
from zeromean.compression.export import tensor_codes
from zeromean.compression.export.blueprint import stored_tensors
from zeromean.compression.export.sizes import size_in_file, size_in_memory
from zeromean.compression.graph.edit import layer_of
from zeromean.compression.graph.edit import obstacle as obstacle_of
from zeromean.compression.graph.trace import is_leaf
from zeromean.compression.modules.batch_last import BatchLast
from zeromean.compression.modules.sparse_layers import SparseConv2d, SparseLinear
from zeromean.compression.units.liveness import by_blocks
from zeromean.compression.units.roles import Role, role_of
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.layers.stochastic_module import StochasticModule
from zeromean.prediction.inputs import Inputs
from zeromean.text_table import text_table


@dataclass(frozen=True)
class CompressedLayer:
    """One row of a `CompressionReport`.

    Attributes:
        name: Name in the model.
        before: Inputs and outputs (of BatchNorm and the like, units) in the model.
        after: The same in the compressed network, None where the layer is gone.
        left: Part of the weights after compression that are not zero.
        storage: "dense", "sparse", "random" for a variance layer, or "none".
        size_before: Bytes in the model, with one number for every weight.
        size_after: Bytes in a file that `export.save_compressed` writes.
        note: What has become of it, or what keeps its units.
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...] | None
    left: float
    storage: str
    size_before: int
    size_after: int
    note: str


@dataclass(frozen=True)
class CompressionReport:
    """What has become of every layer; `print` shows it as a table.

    Attributes:
        layers: The layers of the model that have parameters, and parameters outside of layers.
        original_size: Bytes of the model, with one number for every weight.
        size: Bytes of the tensors in a file that `export.save_compressed` writes.
        obstacle: Why no units could be removed, empty where nothing was in the way.
    """

    layers: tuple[CompressedLayer, ...]
    original_size: int
    size: int
    obstacle: str = ""

    @property
    def compression(self) -> float:
        """original_size / size."""
        return self.original_size / self.size if self.size else math.inf

    def __getitem__(self, name: str) -> CompressedLayer:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def __str__(self) -> str:
        rows = [("layer", "before", "after", "left", "stored", "bytes", "", "")]
        rows += [
            (
                row.name,
                _arrow(row.before),
                _arrow(row.after),
                f"{row.left:.2%}" if row.after else "",
                row.storage if row.after else "",
                f"{row.size_before:,}",
                f"→ {row.size_after:,}",
                row.note,
            )
            for row in self.layers
        ]
        lines = text_table(rows, left=(0, 4, 6, 7))
        lines += [self.obstacle] if self.obstacle else []
        total = f"{self.original_size:,} bytes become {self.size:,}, {self.compression:.1f}× fewer"
        return "\n".join([*lines, total])


@torch.inference_mode(False)
@torch.no_grad()
def compression_report(
    model: nn.Module, compressed: nn.Module, example_inputs: Inputs | None = None
) -> CompressionReport:
    """Compare every layer of a model with what `zm.compress` has made of it.

    Args:
        model: The pruned model.
        compressed: What `zm.compress` returned for it, or `export.load_compressed`.
        example_inputs: Those that `zm.compress` got, if it got any.
    """
    require_model(model)
    require_model(compressed, "compressed")
    if example_inputs is not None:
        run_example(model, example_inputs)
    layers = {name: module for name, module in model.named_modules() if _is_layer(module)}
    # What is not in a layer: positions to add to embeddings, say.
    in_leaves = {id(p) for m in model.modules() if is_leaf(m) for p in m.parameters()}
    alone = {n: p for n, p in model.named_parameters() if id(p) not in in_leaves}
    obstacle = ""
    try:
        network = graph_of(plain_copy(model), example_inputs)
    except Exception as error:
        obstacle = f"No units are removed: torch.fx cannot trace the model ({error})."
        fates = {name: _Fate(name, "") for name in layers}
        places = dict(compressed.named_modules())
        read = set(alone)
    else:
        fates = _fates(analyse(network, example_inputs))
        places = _places(compressed, fates)
        read = {node.target for node in network.graph.nodes if node.op == "get_attr"}
    rows = [_row(name, layer, _fate_of(name, fates), places) for name, layer in layers.items()]
    rows += [_parameter_row(name, tensor, name in read) for name, tensor in alone.items()]
    return CompressionReport(tuple(rows), size_in_memory(model), size_in_file(compressed), obstacle)


class _Fate(NamedTuple):
    """What has become of a layer, and its name in the compressed network unless it is gone."""

    place: str
    note: str
    gone: bool = False


def _fates(found: Analysis) -> dict[str, _Fate]:
    fates: dict[str, _Fate] = {}
    for node in found.network.graph.nodes:
        layer = node.meta.get("layer")
        if layer is not None:
            fates.setdefault(layer, _Fate(node.meta["name"], _note(found, node)))
        for folded in node.meta.get("holds", []):
            fate = _Fate(folded.meta["name"], f"in the weights of {layer}", gone=True)
            fates.setdefault(folded.meta["layer"], fate)
    return fates


def _note(found: Analysis, node: fx.Node) -> str:
    network, needs = found.network, found.needs
    role, layer = role_of(network, node), layer_of(network, node)
    if role is Role.OTHER:
        return obstacle_of(network, node) or f"{type(layer).__name__} stays as it is"
    if role is Role.GROUPED:
        return "a convolution of groups keeps its units"
    if node not in needs.units:
        return ""
    need = needs.units[node]
    gone = int((~need).sum())
    notes = [f"{gone} of {len(need)} units gone"] if gone and role not in _PASSING else []
    if node in needs.readers and not gone:
        notes.append(f"all read by {_called(network, needs.readers[node])}")
    if role is Role.RECURRENT:
        counts = by_blocks(layer, need).sum(1)
        if counts.min() < counts.max():
            notes.append("the largest of its layers and directions decides")
    return "; ".join(notes)


def _called(network: fx.GraphModule, node: fx.Node) -> str:
    """What a reader of units is called."""
    if node.op == "output":
        return "the output"
    if node.op == "call_module":
        kind = type(layer_of(network, node)).__name__
        return f"{node.meta.get('layer', node.meta['name'])} ({kind})"
    return f"{getattr(node.target, '__name__', node.target)}()"


def _fate_of(name: str, fates: dict[str, _Fate]) -> _Fate:
    """That of the layer, for a part of it such as the projection of attention."""
    above, rest = name, ""
    while above not in fates and above:
        above, _, last = above.rpartition(".")
        rest = f".{last}{rest}"
    if above not in fates:
        return _Fate(name, "never called", gone=True)
    return fates[above]._replace(place=fates[above].place + rest)


def _places(compressed: nn.Module, fates: dict[str, _Fate]) -> dict[str, nn.Module]:
    """Every module of a compressed network by the name that it got."""
    if not isinstance(compressed, (nn.Sequential, BatchLast, fx.GraphModule)):
        names = [fate.place for fate in fates.values() if not fate.gone]
        return {names[0]: compressed} if len(names) == 1 else {}
    places: dict[str, nn.Module] = {}
    for path, module in compressed.named_modules():
        parent, _, name = path.rpartition(".")
        in_chain = isinstance(compressed.get_submodule(parent), BatchLast)
        places[name if in_chain else path] = module
    return places


def _row(name: str, layer: nn.Module, fate: _Fate, places: dict[str, nn.Module]) -> CompressedLayer:
    before = size_in_memory(layer)
    label = name or "the model"
    if fate.gone == (fate.place in places):
        raise ValueError(
            f"The compressed network has {'a' if fate.gone else 'no'} layer {fate.place}, which "
            f"does not go with {label} of the model; pass what zm.compress returned for this "
            "model, and the example_inputs that it got."
        )
    if fate.gone:
        return CompressedLayer(label, _ends(layer), None, 0.0, "none", before, 0, fate.note)
    module = places[fate.place]
    matrices = [t for t in stored_tensors(module).values() if t.dim() >= 2]
    count = sum(t.numel() for t in matrices)
    left = sum(int(t.count_nonzero()) for t in matrices) / count if count else 1.0
    after = size_in_file(module)
    return CompressedLayer(
        label, _ends(layer), _ends(module), left, _storage(module), before, after, fate.note
    )


def _parameter_row(name: str, parameter: Tensor, read: bool) -> CompressedLayer:
    if not read:
        return CompressedLayer(name, (), None, 0.0, "none", parameter.nbytes, 0, "never read")
    left = float(parameter.count_nonzero()) / parameter.numel() if parameter.numel() else 1.0
    size = tensor_codes.size(parameter)
    return CompressedLayer(name, (), (), left, "dense", parameter.nbytes, size, "as it was")


def _is_layer(module: nn.Module) -> bool:
    own = any(parameter is not None for parameter in module._parameters.values())
    layer = own and is_leaf(module) and not isinstance(module, Posterior)
    return isinstance(module, StochasticModule) or layer


def _storage(module: nn.Module) -> str:
    if isinstance(module, (SparseLinear, SparseConv2d)):
        return "sparse"
    return "random" if isinstance(module, StochasticModule) else "dense"


def _ends(module: Any) -> tuple[int, ...]:
    for names in _ENDS:
        ends = tuple(getattr(module, name) for name in names if hasattr(module, name))
        if ends:
            return ends
    return tuple(getattr(module, "normalized_shape", ()))


def _arrow(ends: tuple[int, ...] | None) -> str:
    return "–" if ends is None else " → ".join(f"{end:,}" for end in ends)


_PASSING = {Role.NORM, Role.SCALE}
_ENDS = [
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("input_size", "hidden_size"),
    ("num_embeddings", "embedding_dim"),
    ("num_features",),
    ("num_channels",),
    ("num_parameters",),
]
