"""LeNet-300-100 and LeNet-5-Caffe with fewer units, and with sparse weights in what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import shrunk

TITLE = "LeNet-300-100 and LeNet-5-Caffe, shrunk: files of kilobytes and milliseconds (MNIST)"
SOURCE = "ours; the networks of Molchanov et al. (2017) and Neklyudov et al. (2017)"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS: tuple[str, ...] = ()
TIMINGS = ("*.speedup.*", "*.speedup_batch_256")
# For each network the bytes of a file that is asked for.
FILES = {"lenet_300_100": 15_000, "lenet5_caffe": 10_000}
NOTES = (
    "Every step first takes units away and then makes the weights that are left sparse; both "
    "networks are measured. Structured: the smallest one of the first kind at no more than "
    "{setting loss} points of validation accuracy; both: the most accurate one whose file has at "
    "most 15,000 bytes (LeNet-300-100) or 10,000 (LeNet-5-Caffe). Sparse weights alone are in "
    "`sparse_lenet300` and `sparse_lenet5`. Times are CPU times on one thread.",
)


@dataclass(frozen=True, kw_only=True)
class Config(shrunk.Settings):
    """Two networks, each in at most eight steps; about an hour and a half of one core."""

    loss: float = 0.3
    """Points of validation accuracy that the structured network may lose."""


QUICK = Config(**shrunk.QUICK)
SMOKE = Config(**shrunk.SMOKE, loss=100.0)
CLAIMS = [
    Claim(
        "lenet5_caffe.both.error", 0.9, ours(), 0.0, "at most", "LeNet-5-Caffe, both: error", "%"
    ),
    Claim(
        "lenet5_caffe.both.file_bytes",
        10_000,
        ours(),
        0.0,
        "at most",
        "LeNet-5-Caffe, both: bytes of the file",
    ),
    Claim(
        "lenet5_caffe.both.speedup.onnxruntime_64",
        5.0,
        ours(),
        0.0,
        "at least",
        "LeNet-5-Caffe, both: times faster in onnxruntime, batches of 64",
        "×",
    ),
    Claim(
        "lenet_300_100.both.error", 2.0, ours(), 0.0, "at most", "LeNet-300-100, both: error", "%"
    ),
    Claim(
        "lenet_300_100.both.file_bytes",
        15_000,
        ours(),
        0.0,
        "at most",
        "LeNet-300-100, both: bytes of the file",
    ),
    Claim(
        "lenet_300_100.both.speedup_batch_256",
        4.0,
        ours(),
        0.0,
        "at least",
        "LeNet-300-100, both: times faster in onnxruntime, batches of 256",
        "×",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean.experiments.sparse_networks.sparse_lenet5 import relu_lenet5_caffe
    from zeromean.models.lenet import lenet_300_100
    from zeromean.training import Target

    sets = shrunk.Sets(config, log)
    builders = {"lenet_300_100": lenet_300_100, "lenet5_caffe": relu_lenet5_caffe}
    found: dict[str, Any] = {}
    for name, build in builders.items():
        dense = shrunk.train_dense(name, build, config, sets, log)
        # One run: the second asks the same networks for something else.
        options: dict[str, Any] = {"name": name, "sparse_weights": True}
        small = Target(file_size=FILES[name])
        both = shrunk.shrink(dense, config, sets, log, target=small, **options)
        assert both.folder is not None
        found[name] = {"both": shrunk.results(both, sets.test)}
        found[name]["both"]["speedup_batch_256"] = shrunk.times_faster(
            both.folder / "original" / "network.onnx",
            both.folder / "chosen.onnx",
            sets.test.images[:256],
        )
        units = shrunk.structured(both, config.loss)
        found[name]["structured"] = shrunk.results(units, sets.test)
    return found


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    return [
        drawn
        for name in metrics[0]
        for drawn in shrunk.curves(
            f"{name}: error of all networks on the way",
            {"units and weights": [m[name]["both"] for m in metrics]},
        )
    ]
