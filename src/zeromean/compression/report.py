"""What `zm.compress` has made of every layer, and why."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from zeromean.arguments import require_flag, require_model
from zeromean.compression.analysis import run_example
from zeromean.compression.compress import compressed_with_plan, plain_copy
from zeromean.compression.export import tensor_codes
from zeromean.compression.export.blueprint import stored_tensors
from zeromean.compression.export.sizes import size_in_file, size_in_memory
from zeromean.compression.inventory import layers_of, loose_parameters, sizes_of
from zeromean.compression.layer_times import layer_milliseconds
from zeromean.compression.modules.sparse_layers import SparseConv2d, SparseLinear
from zeromean.compression.plan import Plan, PlannedLayer, Reason, plan_of
from zeromean.compression.speed import milliseconds, torch_calls
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
        ms_before: Milliseconds in the model, None where nothing was measured.
        ms_after: The same in the compressed network; None too for a layer of a chain that is
            multiplied as a whole.
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...] | None
    left: float
    storage: str
    size_before: int
    size_after: int
    note: str
    ms_before: float | None = None
    ms_after: float | None = None


@dataclass(frozen=True)
class CompressionReport:
    """What has become of every layer; `print` shows it as a table.

    Attributes:
        layers: The layers of the model that have parameters, and parameters outside of layers.
        original_size: Bytes of the model, with one number for every weight.
        size: Bytes of the tensors in a file that `export.save_compressed` writes.
        obstacle: Why no units could be removed, empty where nothing was in the way.
        replanned: Whether the network carries no plan for this model, as it does not from a file:
            the notes are then those of compressing the model again.
        ms_before: Milliseconds of a prediction by the model, None where nothing was measured.
        ms_after: The same for the compressed network.
    """

    layers: tuple[CompressedLayer, ...]
    original_size: int
    size: int
    obstacle: str = ""
    replanned: bool = False
    ms_before: float | None = None
    ms_after: float | None = None

    @property
    def limit(self) -> str:
        """Which layers are what is left of the network, and what keeps them."""
        largest = max(self.layers, key=lambda row: row.size_after)
        said = [f"{largest.name} has {largest.size_after / max(self.size, 1):.0%} of the bytes"]
        timed = [row for row in self.layers if row.ms_after is not None]
        if timed:
            total = sum(row.ms_after or 0.0 for row in timed)
            slowest = max(timed, key=lambda row: row.ms_after or 0.0)
            share = (slowest.ms_after or 0.0) / max(total, 1e-9)
            said.append(f"{slowest.name} takes {share:.0%} of the layers' time")
        kept = [row.name for row in self.layers if row.after and "all read by" in row.note]
        said += [f"the units of {', '.join(kept)} are all read"] if kept else []
        if any(row.storage == "sparse" for row in self.layers):
            said.append("sparse layers are dense again in ONNX, and no faster there")
        return "; ".join(said)

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
        measured = self.ms_before is not None
        titles = ("ms", "") if measured else ()
        rows = [("layer", "before", "after", "left", "stored", "bytes", "", *titles, "")]
        rows += [
            (
                row.name,
                _arrow(row.before),
                _arrow(row.after),
                f"{row.left:.2%}" if row.after else "",
                row.storage if row.after else "",
                f"{row.size_before:,}",
                f"→ {row.size_after:,}",
                *((_ms(row.ms_before), f"→ {_ms(row.ms_after)}") if measured else ()),
                row.note,
            )
            for row in self.layers
        ]
        lines = text_table(rows, left=(0, 4, 6, 8, 9) if measured else (0, 4, 6, 7))
        lines += [self.obstacle] if self.obstacle else []
        lines += [_REPLANNED] if self.replanned else []
        total = f"{self.original_size:,} bytes become {self.size:,}, {self.compression:.1f}× fewer"
        lines.append(total)
        if self.ms_before is not None and self.ms_after is not None:
            times = f"{self.ms_before:.3g} ms become {self.ms_after:.3g}"
            lines += [f"{times}, {self.ms_before / self.ms_after:.1f}× faster", self.limit]
        return "\n".join(lines)

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draw bytes of every layer, and milliseconds if measured, into a PNG (extra `cli`)."""
        from zeromean.compression.report_picture import draw

        draw(self, Path(path))


@torch.inference_mode(False)
@torch.no_grad()
def compression_report(
    model: nn.Module,
    compressed: nn.Module,
    example_inputs: Inputs | None = None,
    *,
    measure: bool = False,
) -> CompressionReport:
    """Compare every layer of a model with what `zm.compress` has made of it.

    Args:
        model: The pruned model.
        compressed: What `zm.compress` returned for it, or `export.load_compressed`.
        example_inputs: Those that `zm.compress` got, if it got any. A network that carries its plan
            (what `zm.compress` returned, and copies of it) is reported without them.
        measure: Also measure the milliseconds of every layer for the example_inputs, in torch, on
            one thread; the model's with plain layers in place of stochastic ones.
    """
    require_model(model)
    require_flag("measure", measure)
    if measure and example_inputs is None:
        raise ValueError("measure=True times the models on example_inputs; pass a batch of them.")
    require_model(compressed, "compressed")
    plan = plan_of(compressed)
    replanned = plan is None or not _fits(plan, model)
    if plan is None or replanned:
        plan = _plan_again(model, compressed, example_inputs)
    layers, modules = layers_of(model), _modules_of(compressed)
    rows = [_row(name, layers[name], layer, modules) for name, layer in plan.layers.items()]
    loose = loose_parameters(model)
    rows += [_parameter_row(name, loose[name], reason) for name, reason in plan.parameters.items()]
    sizes = size_in_memory(model), size_in_file(compressed)
    report = CompressionReport(tuple(rows), *sizes, plan.obstacle, replanned)
    if example_inputs is None or not measure:
        return report
    return _timed(report, plan, plain_copy(model), compressed, example_inputs)


def _timed(
    report: CompressionReport, plan: Plan, plain: nn.Module, compressed: nn.Module, inputs: Inputs
) -> CompressionReport:
    """The report with what each layer takes."""
    places = {name: layer.place for name, layer in plan.layers.items()}
    before = layer_milliseconds(plain, inputs, places)
    after = layer_milliseconds(compressed, inputs, set(places.values()))
    rows = list(report.layers)
    for number, (name, place) in enumerate(places.items()):
        rows[number] = replace(
            rows[number],
            ms_before=before.get(name),
            ms_after=None if place is None else after.get(place),
        )
    calls = {"before": torch_calls(plain, inputs), "after": torch_calls(compressed, inputs)}
    totals = milliseconds(calls)
    return replace(report, layers=tuple(rows), ms_before=totals["before"], ms_after=totals["after"])


def _fits(plan: Plan, model: nn.Module) -> bool:
    """Whether a plan may be that of a model: its layers are of these names and sizes."""
    layers = {name: layer.sizes for name, layer in plan.layers.items()}
    same = layers == {name: sizes_of(layer) for name, layer in layers_of(model).items()}
    return same and plan.parameters.keys() == loose_parameters(model).keys()


def _plan_again(model: nn.Module, compressed: nn.Module, example_inputs: Inputs | None) -> Plan:
    """What `zm.compress` decides now; ValueError where the network is not what it makes of that."""
    if example_inputs is not None:
        run_example(model, example_inputs)
    again, plan = compressed_with_plan(model, example_inputs)
    theirs, ours = _modules_of(compressed), _modules_of(again)
    for name, layer in plan.layers.items():
        if layer.place is not None and layer.place not in theirs:
            raise _no_match(f"no layer {layer.place}, which does not go with {name or 'the model'}")
    for place in theirs:
        if place not in ours:
            raise _no_match(f"a layer {place}, which does not go with what is left")
    return plan


def _modules_of(network: nn.Module) -> dict[str, nn.Module]:
    """By all their paths: what is one module here may be several in a network from a file."""
    return dict(network.named_modules(remove_duplicate=False))


def _no_match(what: str) -> ValueError:
    return ValueError(
        f"The compressed network has {what} of the model; pass what zm.compress returned for this "
        "model, and the example_inputs that it got."
    )


def _row(
    name: str, layer: nn.Module, planned: PlannedLayer, modules: dict[str, nn.Module]
) -> CompressedLayer:
    name, before, note = name or "the model", size_in_memory(layer), planned.note
    if planned.place is None:
        return CompressedLayer(name, planned.sizes, None, 0.0, "none", before, 0, note)
    if planned.place not in modules:
        raise _no_match(f"no layer {planned.place}, which does not go with {name}")
    module = modules[planned.place]
    matrices = [t for t in stored_tensors(module).values() if t.dim() >= 2]
    count = sum(t.numel() for t in matrices)
    left = sum(int(t.count_nonzero()) for t in matrices) / count if count else 1.0
    sizes, after = sizes_of(module), size_in_file(module)
    return CompressedLayer(name, planned.sizes, sizes, left, _storage(module), before, after, note)


def _parameter_row(name: str, parameter: Tensor, reason: Reason) -> CompressedLayer:
    before, note = parameter.nbytes, str(reason)
    if reason is Reason.NOT_READ:
        return CompressedLayer(name, (), None, 0.0, "none", before, 0, note)
    left = float(parameter.count_nonzero()) / parameter.numel() if parameter.numel() else 1.0
    size = tensor_codes.size(parameter)
    return CompressedLayer(name, (), (), left, "dense", before, size, note)


def _storage(module: nn.Module) -> str:
    if isinstance(module, (SparseLinear, SparseConv2d)):
        return "sparse"
    return "random" if isinstance(module, StochasticModule) else "dense"


def _ms(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.3g}"


def _arrow(ends: tuple[int, ...] | None) -> str:
    return "–" if ends is None else " → ".join(f"{end:,}" for end in ends)


_REPLANNED = "The network carries no plan of its own: the notes are of compressing the model again."
