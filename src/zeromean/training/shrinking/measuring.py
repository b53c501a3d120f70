"""What is measured of every network on the way: score, weights, files, and time where it runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.compression.compress import compressed_with_plan
from zeromean.compression.export.compressed import save_compressed
from zeromean.compression.export.int8_onnx import OnnxNetwork, save_int8_onnx
from zeromean.compression.export.onnx import save_onnx
from zeromean.compression.export.sizes import size_in_file, size_in_memory
from zeromean.compression.int8 import to_int8
from zeromean.compression.plan import Plan, composed, leave_plan_
from zeromean.compression.rounding import rounded
from zeromean.compression.sparsity import sparsity
from zeromean.compression.speed import has_onnxruntime, milliseconds, onnx_calls, torch_calls
from zeromean.files.atomic import whole_file
from zeromean.layers.plain_attention import PlainAttention
from zeromean.training.data_sources import evaluation_batches
from zeromean.training.distributed import ALONE
from zeromean.training.evaluation import evaluate
from zeromean.training.mini_batches import first_rows, split_batch
from zeromean.training.shrinking.result import ShrunkNetwork
from zeromean.training.shrinking.steps import Work
from zeromean.training.shrinking.target import MOST_LOST, Target

# Batches that are timed.
BATCH_SIZES = (1, 64)
# Widths of weights, tried one after the other, and which part they may cost of the loss that is
# allowed.
_BITS = (8, 6, 5, 4)
_FOR_BITS = 0.25
# Weights of a linear layer for which integers are tried, and how much faster they must be.
_LARGE = 2**14
_FASTER = 0.95
NETWORK, ONNX, TIMES = "network.safetensors", "network.onnx", "times.json"


class Measurements:
    """Measures networks next to the original.

    Args:
        original: A plain network.
        target: Says where it must run; without that, where it can.

    Attributes:
        key: The time that counts, of `ShrunkNetwork.milliseconds`.
    """

    def __init__(self, work: Work, original: nn.Module, target: Target):
        self.work, runtime = work, target.runtime
        self.model = original.eval()
        folder = work.folder / "original"
        folder.mkdir(parents=True, exist_ok=True)
        self.onnx = None
        if runtime == "onnxruntime" or _can_hold(work.example):
            try:
                self.onnx = self._export(original, folder)
            except ValueError:
                if runtime == "onnxruntime":
                    raise
        counts = runtime or ("torch" if self.onnx is None else "onnxruntime")
        self.key = f"{counts} {target.batch_size}"
        times = self._times(folder, lambda: milliseconds(self._calls(original, self.onnx)))
        self.original = ShrunkNetwork(
            "original",
            self._score(original),
            sparsity(original).total.kept,
            size_in_memory(original),
            times,
            None if self.onnx is None else self.onnx.stat().st_size,
            original,
            "original",
        )

    def network(
        self, name: str, title: str, trained: nn.Module, plan: Plan, allowed: float | None
    ) -> list[ShrunkNetwork]:
        """What a trained network is when it is compressed, and when its weights are rounded too.

        Args:
            name: Of its folder.
            plan: What was decided about the original until now.
            allowed: By how much its score may be worse than the original's; None for every width
                of its weights, whatever it costs.
        """
        compressed, last = compressed_with_plan(trained, self.work.example)
        plan = composed(plan, last)
        leave_plan_(compressed, plan)
        folder = self.work.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        onnx = None if self.onnx is None else self._export(compressed, folder)
        exact = ShrunkNetwork(
            title,
            self._score(compressed),
            sparsity(compressed).total.kept,
            _saved_size(compressed, folder / NETWORK),
            self._times(folder, lambda: self._next_to_original(compressed, onnx)),
            None if onnx is None else onnx.stat().st_size,
            compressed,
            name,
        )
        return [exact, *self._rounded(exact, plan, allowed), *self._in_int8(exact, allowed)]

    def _rounded(
        self, exact: ShrunkNetwork, plan: Plan, allowed: float | None
    ) -> list[ShrunkNetwork]:
        """The network in the fewest bits that hardly cost anything; it takes as long as before."""
        found: list[ShrunkNetwork] = []
        for bits in _BITS:
            model = rounded(exact.model, bits)
            score = self._score(model)
            if allowed is not None and not self._is_good_enough(score, exact.score, allowed):
                break
            leave_plan_(model, plan)
            name = f"{exact.folder}/{bits} bits"
            folder = self.work.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            small = replace(
                exact,
                name=f"{exact.name}, {bits} bits",
                score=score,
                weights=sparsity(model).total.kept,
                file_size=_saved_size(model, folder / NETWORK),
                model=model,
                folder=name,
                bits=bits,
            )
            if small.file_size < exact.file_size:
                found.append(small)
        return found if allowed is None else found[-1:]

    def _in_int8(self, exact: ShrunkNetwork, allowed: float | None) -> list[ShrunkNetwork]:
        """The network with integer products, if it has large ones and is faster so where it counts.

        For onnxruntime that is another ONNX file; its file and what torch runs are the exact ones.
        """
        if not any(_is_large(module) for module in exact.model.modules()):
            return []
        name = f"{exact.folder}/int8"
        folder = self.work.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        int8 = replace(exact, name=f"{exact.name}, int8", folder=name)
        exactly = self.work.folder / exact.folder
        if (exactly / NETWORK).exists():
            shutil.copyfile(exactly / NETWORK, folder / NETWORK)
        if self.key.startswith("torch"):
            scored = model = to_int8(exact.model, min_weights=_LARGE)
            int8, calls = replace(int8, model=model), partial(self._calls, model, None)
        else:
            save_int8_onnx(exactly / ONNX, folder / ONNX)
            scored = OnnxNetwork(folder / ONNX)
            int8 = replace(int8, onnx_size=(folder / ONNX).stat().st_size)
            calls = partial(self._calls, exact.model, folder / ONNX)
        int8 = replace(int8, score=self._score(scored))
        times = self._times(folder, lambda: self._next_to(exact, calls()))
        int8 = replace(int8, milliseconds=exact.milliseconds | times)
        bound = MOST_LOST if allowed is None else allowed
        pays = int8.milliseconds[self.key] < _FASTER * exact.milliseconds[self.key]
        return [int8] if pays and self._is_good_enough(int8.score, exact.score, bound) else []

    def _next_to(
        self, exact: ShrunkNetwork, calls: dict[str, Callable[[], Any]]
    ) -> dict[str, float]:
        """Times of calls in those of the exact network, measured again in turn with it."""
        runtime = self.key.partition(" ")[0]
        ours = {key: call for key, call in calls.items() if key.startswith(runtime)}
        onnx = None if self.onnx is None else self.work.folder / exact.folder / ONNX
        theirs = self._calls(exact.model, onnx)
        together = {f"int8 {key}": call for key, call in ours.items()}
        together |= {f"exact {key}": theirs[key] for key in ours}
        found = milliseconds(together)
        return {
            key: exact.milliseconds[key] * found[f"int8 {key}"] / found[f"exact {key}"]
            for key in ours
        } | {key: value for key, value in exact.milliseconds.items() if key not in ours}

    def _is_good_enough(self, score: float, exact: float, allowed: float) -> bool:
        """Whether rounding costs next to nothing, and nothing that is missing elsewhere."""
        lost, before = self.original.score - score, self.original.score - exact
        return lost <= max(before, min(allowed, before + _FOR_BITS * min(allowed, 1.0)))

    def export(self, network: ShrunkNetwork) -> None:
        """Write the ONNX file of a network that shares the times of another one."""
        folder = self.work.folder / network.folder
        if self.onnx is not None and not (folder / TIMES).exists():
            example: Any = self.work.example
            save_onnx(network.model, folder / ONNX, example)

    def standard_error(self) -> float:
        """Of the original's accuracy on the validation data, in points; 0 with a likelihood."""
        if self.work.likelihood is not None:
            return 0.0
        count = sum(len(split_batch(b)[1]) for b in evaluation_batches(self.work.validation))
        share = self.original.score / 100
        # One error more than there were: no accuracy is known without any error.
        return 100 * (max(share * (1 - share), (1 - 1 / count) / count) / count) ** 0.5

    def _score(self, model: nn.Module) -> float:
        found = evaluate(
            model,
            self.work.validation,
            self.work.likelihood,
            seed_of=lambda index: index,
            device=torch.device("cpu"),
            group=ALONE,
        )
        return found["accuracy"] if self.work.likelihood is None else -found["nll"]

    def _export(self, model: nn.Module, folder: Path) -> Path:
        # Where it has been measured, it is that of this network: `fit` refuses another training.
        if not ((folder / TIMES).exists() and (folder / ONNX).exists()):
            example: Any = self.work.example
            save_onnx(model, folder / ONNX, example)
        return folder / ONNX

    def _calls(self, model: nn.Module, onnx: Path | None) -> dict[str, Callable[[], Any]]:
        calls: dict[str, Callable[[], Any]] = {}
        for size in BATCH_SIZES:
            calls[f"torch {size}"] = torch_calls(model, first_rows(self.work.example, size))
        for size in BATCH_SIZES if onnx is not None else ():
            assert onnx is not None
            calls[f"onnxruntime {size}"] = onnx_calls(onnx, first_rows(self.work.example, size))
        return calls

    def _next_to_original(self, model: nn.Module, onnx: Path | None) -> dict[str, float]:
        """Times in those of the original, which is measured again in turn with the network."""
        theirs, ours = self._calls(self.model, self.onnx), self._calls(model, onnx)
        together = {("original", key): call for key, call in theirs.items()}
        together |= {("network", key): call for key, call in ours.items()}
        found = milliseconds({" ".join(key): call for key, call in together.items()})
        return {
            key: self.original.milliseconds[key]
            * found[f"network {key}"]
            / found[f"original {key}"]
            for key in ours
        }

    def _times(self, folder: Path, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Measured once: a run that goes on chooses as it would have chosen."""
        path = folder / TIMES
        runtimes = ("torch",) if self.onnx is None else ("torch", "onnxruntime")
        wanted = [f"{runtime} {size}" for runtime in runtimes for size in BATCH_SIZES]
        if path.exists():
            times = json.loads(path.read_text("utf-8"))
            if times.keys() >= set(wanted):
                return {key: times[key] for key in wanted}
        times = measure()
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(times), "utf-8")
        return times


def _saved_size(model: nn.Module, path: Path) -> int:
    try:
        return save_compressed(model, path).size
    except ValueError:  # Of layers that such a file cannot describe.
        return size_in_file(model)


def _is_large(module: nn.Module) -> bool:
    """Whether integer products may pay."""
    if isinstance(module, (nn.MultiheadAttention, PlainAttention)):
        return module.out_proj.weight.numel() >= _LARGE
    return type(module) is nn.Linear and module.weight.numel() >= _LARGE


def _can_hold(example: Any) -> bool:
    """Whether ONNX files are worth a try."""
    return has_onnxruntime() and isinstance(example, (Tensor, tuple))
