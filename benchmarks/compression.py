"""Compressed against dense: speed in one process on one thread, and size of the file.

python benchmarks/compression.py --lenet-300-100 mlp.safetensors --lenet-5-caffe conv.safetensors
python benchmarks/compression.py    with random masks at published sparsities

The files are pruned networks that `zm.save` wrote, as `zeromean run compression` and `zeromean run
sparse_lstm` do. Without them, masks are drawn in which some units matter more than others, as
training leaves them. A speed-up is the median of CPU time ratios over alternating pairs, as in
`run.py`; "dense" is the same network in plain torch.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "src"))

import environment  # noqa: E402
import torch  # noqa: E402
from harness import cpu_ratio  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import zeromean as zm  # noqa: E402
from zeromean import export, models  # noqa: E402
from zeromean.experiments.sparse_networks.sparse_lenet5 import relu_lenet5_caffe  # noqa: E402
from zeromean.experiments.sparse_networks.sparse_lstm import RowReader  # noqa: E402


@dataclass(frozen=True)
class Subject:
    """A network, the sparsity of its weights as published, and what it must reach."""

    name: str
    build: Callable[[], nn.Module]
    sparsities: dict[str, float]
    batches: dict[int, tuple[float, float] | None]  # size: (must reach, aim)
    file: tuple[float, float] | None = None
    pixels: int = 28


SUBJECTS = {
    "lenet_300_100": Subject(
        "LeNet-300-100",
        models.lenet_300_100,
        {"dense1.weight": 0.989, "dense2.weight": 0.972, "dense3.weight": 0.62},
        {1: (2.2, 3.5), 32: None, 256: (3.5, 5)},
        (30, 50),
    ),
    "lenet_5_caffe": Subject(
        "LeNet-5-Caffe",
        relu_lenet5_caffe,
        {
            "conv1.weight": 0.67,
            "conv2.weight": 0.98,
            "dense1.weight": 0.998,
            "dense2.weight": 0.95,
        },
        {1: None, 64: (2, 4), 256: None},
        (100, 200),
    ),
    # The sparsities of our own record, results/experiments/sparse_lstm.json.
    "sparse_lstm": Subject(
        "LSTM with 96 units",
        lambda: RowReader(96),
        {"lstm.weight_ih_l0": 0.969, "lstm.weight_hh_l0": 0.992, "head.weight": 0.855},
        {1: None, 32: None, 256: None},
        pixels=8,
    ),
}


@dataclass(frozen=True)
class Row:
    """How many times faster or smaller, with quartiles where it is a time."""

    network: str
    what: str
    factor: float
    lower: float
    upper: float
    must: float | None = None
    aim: float | None = None

    @property
    def verdict(self) -> str:
        if self.must is None or self.aim is None:
            return ""
        return next(
            text
            for bound, text in ((self.aim, "aim reached"), (self.must, "reached"), (0, "MISSED"))
            if self.factor >= bound
        )


def measure(
    subject: Subject,
    dense: nn.Module,
    compressed: nn.Module,
    *,
    repeats: int = 31,
    budget: float = 6.0,
) -> list[Row]:
    """The rows of one pruned network: dense with zeros, and compressed."""
    sparsity = zm.sparsity(dense).total
    rows = [_exactly(subject, "weights, compression factor", sparsity.compression)]
    for batch, bounds in subject.batches.items():
        x = torch.rand(batch, 1, subject.pixels, subject.pixels)
        must, aim = bounds or (None, None)
        rivals = {"compressed": compressed} | _in_csr(dense)
        for name, rival in rivals.items():
            ratio = _speed(rival, dense, x, repeats, budget)
            goals = (must, aim) if rival is compressed else (None, None)
            rows.append(Row(subject.name, f"batch {batch}, {name}", *ratio, *goals))
    with tempfile.TemporaryDirectory() as folder:
        saved = export.save_compressed(compressed, Path(folder) / "m", original=dense)
    assert saved.ratio is not None
    goals = subject.file or ()
    rows.append(_exactly(subject, f"file, {saved.size:,} bytes", saved.ratio, *goals))
    return rows


def pruned(subject: Subject, path: Path | None) -> nn.Module:
    """A trained network from a file, or random masks; plain torch with zeros."""
    if path is not None:
        return zm.to_deterministic(zm.load(path, subject.build())).eval()
    network = subject.build().eval()
    with torch.no_grad():
        for name, sparsity in subject.sparsities.items():
            weight = network.get_parameter(name)
            weight *= _mask(weight, sparsity)
    return network


def table(rows: list[Row]) -> str:
    lines = [["network", "", "times", "quartiles", "must reach", "aim", "verdict"]]
    for row in rows:
        quartiles = "" if row.lower == row.upper else f"{row.lower:.2f} to {row.upper:.2f}"
        bounds = ["" if bound is None else f"{bound:g}" for bound in (row.must, row.aim)]
        lines.append([row.network, row.what, f"{row.factor:.2f}", quartiles, *bounds, row.verdict])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def _speed(
    subject: Callable[[Tensor], Any], dense: nn.Module, x: Tensor, repeats: int, budget: float
) -> tuple[float, float, float]:
    with torch.inference_mode():
        torch.testing.assert_close(subject(x), dense(x), rtol=1e-4, atol=1e-5)
        ratio = cpu_ratio(lambda: subject(x), lambda: dense(x), repeats=repeats, budget=budget)
    return 1 / ratio.median, 1 / ratio.upper, 1 / ratio.lower


def _in_csr(dense: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """The same with torch's own sparse matrices, where there are only linear layers."""
    layers = [module for module in dense.children() if not isinstance(module, nn.Flatten)]
    if not all(isinstance(module, (nn.Linear, nn.ReLU)) for module in layers):
        return {}
    weights: Any = [
        (m.weight.detach().to_sparse_csr(), m.bias.detach().unsqueeze(1))
        for m in layers
        if isinstance(m, nn.Linear)
    ]

    def predict(x: Tensor) -> Tensor:
        x = x.flatten(1).t()
        for weight, bias in weights[:-1]:
            x = (weight @ x + bias).relu_()
        weight, bias = weights[-1]
        return (weight @ x + bias).t()

    return {"torch.sparse CSR": predict}


def _mask(weight: Tensor, sparsity: float) -> Tensor:
    """Some units matter more than others, as in trained networks."""
    matter = weight.abs() * torch.exp(1.5 * torch.randn(weight.shape[0])).view(
        -1, *[1] * (weight.dim() - 1)
    )
    matter = matter * torch.exp(1.5 * torch.randn(weight.shape[1:]))
    kept = max(1, round((1 - sparsity) * weight.numel()))
    return matter >= matter.flatten().topk(kept).values[-1]


def _exactly(subject: Subject, what: str, factor: float, *bounds: float) -> Row:
    return Row(subject.name, what, factor, factor, factor, *bounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in SUBJECTS:
        parser.add_argument("--" + name.replace("_", "-"), type=Path, metavar="FILE", dest=name)
    parser.add_argument("--repeats", type=int, default=31, help="pairs a row, at most")
    parser.add_argument("--output", type=Path, help="record to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[Row] = []
    reports: dict[str, str] = {}
    for name, subject in SUBJECTS.items():
        dense = pruned(subject, getattr(options, name))
        compressed = zm.compress(dense)
        reports[name] = str(zm.compression_report(dense, compressed))
        rows += measure(subject, dense, compressed, repeats=options.repeats)
    print(table(rows))
    if options.output:
        record = environment.describe("torch") | {
            "trained": [name for name in SUBJECTS if getattr(options, name) is not None],
            "reports": reports,
            "rows": [{**asdict(row), "verdict": row.verdict} for row in rows],
        }
        environment.write(options.output, record)


if __name__ == "__main__":
    main()
