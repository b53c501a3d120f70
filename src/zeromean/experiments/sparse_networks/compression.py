"""The sparse LeNets made plain, small and fast, against the dense ones: speed, files, ONNX."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import bars
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import (
    lenet_training,
    measures,
    sparse_lenet5,
    sparse_lenet300,
)

if TYPE_CHECKING:
    from zeromean.data import ImageSet

TITLE = "Compressed networks against dense ones: speed and size"
SOURCE = "ours: what users of pruning packages miss"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS: tuple[str, ...] = ()
VERSION = 2  # Trained on 55,000 images, the others being the validation set.
TIMINGS = ("*.batch_*",)
SIZES = ("full", "quick", "smoke")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Two networks that were trained by `sparse_lenet300` and `sparse_lenet5`, or are now."""

    size: str = "full"
    """Which size of these experiments: full, quick or smoke."""
    repeats: int = 31
    """Pairs of measurements, dense and compressed in turn, for each ratio."""
    seed: int = 0
    """Seed of the networks."""


QUICK = Config(size="quick")
SMOKE = Config(size="smoke", repeats=3)
CLAIMS = [
    Claim(f"{network}.{metric}", bound, ours(), 0.0, "at least", label, "×")
    for network, metric, bound, label in (
        ("lenet_300_100", "batch_256", 3.0, "LeNet-300-100, batch 256: times faster"),
        ("lenet_300_100", "batch_1", 2.0, "LeNet-300-100, batch 1: times faster"),
        ("lenet_300_100", "file", 30.0, "LeNet-300-100: file, times smaller"),
        ("lenet5_caffe", "batch_64", 2.0, "LeNet-5-Caffe, batch 64: times faster"),
        ("lenet5_caffe", "file", 100.0, "LeNet-5-Caffe: file, times smaller"),
    )
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean.models.lenet import lenet_300_100

    if config.size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, got {config.size!r}.")
    networks: dict[str, tuple[Any, Callable[..., nn.Module], tuple[int, ...]]] = {
        "lenet_300_100": (sparse_lenet300, lenet_300_100, (1, 32, 256)),
        "lenet5_caffe": (sparse_lenet5, sparse_lenet5.relu_lenet5_caffe, (1, 64, 256)),
    }
    results = {}
    for name, (experiment, architecture, batches) in networks.items():
        sizes: dict[str, Any] = {"quick": experiment.QUICK, "smoke": experiment.SMOKE}
        settings = replace(sizes.get(config.size, experiment.Config()), seed=config.seed)
        train = shared_networks.grey_images(settings.data, "rest", settings.train_size, log)
        test = shared_networks.grey_images(settings.data, "test", settings.test_size, log)
        trained = lenet_training.train_sparse(architecture, settings, train, log)
        pruned = measures.pruned_copy(trained.model)
        zm.save(pruned, log.folder / f"{name}.safetensors")
        log.say(f"measuring {name}")
        results[name] = _measure(pruned, test, batches, config.repeats, log.folder)
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    drawn = []
    for network in metrics[0]:
        rows = [
            {
                name.replace("_", " "): {"times": value}
                for name, value in m[network].items()
                if name.startswith("batch") or name in ("file", "onnx_file", "weights")
            }
            for m in metrics
        ]
        drawn.append(
            bars(
                f"{network}: compressed against dense",
                "",
                {"times": "times faster or smaller"},
                rows,
                y_label="times",
            )
        )
    return drawn


def _measure(
    pruned: nn.Module, test: ImageSet, batches: Sequence[int], repeats: int, folder: Path
) -> dict[str, Any]:
    from zeromean import export

    dense = zm.to_deterministic(pruned).eval()
    dense.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    compressed = zm.compress(pruned, example_inputs=test.images[:100])
    saved = export.save_compressed(compressed, folder / "compressed.safetensors", original=dense)
    example = test.images[:2]
    onnx = export.save_onnx(compressed, folder / "compressed.onnx", example, original=dense)
    assert saved.ratio is not None
    assert onnx.ratio is not None
    speed = {
        f"batch_{batch}": times_faster(compressed, dense, test.images[:batch], repeats)
        for batch in batches
    }
    return {
        **speed,
        "file": saved.ratio,
        "file_bytes": saved.size,
        "onnx_file": onnx.ratio,
        "weights": zm.sparsity(pruned).total.compression,
        "error": measures.error(compressed, test),
        "error_of_onnx": _onnx_error(folder / "compressed.onnx", test),
        "largest_difference": _largest_difference(compressed, dense, test.images),
    }


@torch.inference_mode()
def times_faster(compressed: nn.Module, dense: nn.Module, inputs: Tensor, repeats: int) -> float:
    """Median ratio of CPU times on one thread, the two in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls = {"dense": lambda: dense(inputs), "compressed": lambda: compressed(inputs)}
        counts = {name: max(1, round(0.02 / _seconds(call, 3))) for name, call in calls.items()}
        ratios = [
            _seconds(calls["dense"], counts["dense"])
            / _seconds(calls["compressed"], counts["compressed"])
            for _ in range(repeats)
        ]
    finally:
        torch.set_num_threads(threads)
    return statistics.median(ratios)


def _seconds(call: Callable[[], Any], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return max(time.process_time() - start, 1e-9) / count


@torch.no_grad()
def _largest_difference(compressed: nn.Module, dense: nn.Module, images: Tensor) -> float:
    return max(
        float((compressed(batch) - dense(batch)).abs().max()) for batch in images.split(1000)
    )


def _onnx_error(path: Path, test: ImageSet) -> float:
    """Error of the network as onnxruntime runs it, in per cent."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    outputs = [session.run(None, {name: x.numpy()})[0] for x in test.images.split(1000)]
    wrong = torch.cat([torch.as_tensor(o) for o in outputs]).argmax(-1) != test.labels
    return 100 * wrong.double().mean().item()
