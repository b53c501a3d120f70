"""What `fit` costs, and what a second process brings; writes results/training.json.

    OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 \
        .venv/bin/python benchmarks/training.py            # on a quiet machine of two cores
    .venv/bin/python benchmarks/training.py --quick        # writes nothing

Images a second of one process with one thread and of two, LeNet-5 with batches of 512 in all; a
step of `fit` next to one of a bare loop with the same network, loss and optimizer; and resident
memory over many steps. Wall time, since processes that wait use no CPU time; what `fit` adds is
given in CPU time as well, which a loaded machine changes less. Six minutes.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import environment
import psutil
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.data import Batches, ImageSet
from zeromean.models.lenet import lenet5
from zeromean.training import TrainingConfig, fit

RECORD = Path(__file__).resolve().parent.parent / "results" / "training.json"
BATCH_SIZE = 512
TIMES_FASTER = 1.7
MOST_OVERHEAD = 0.05
# MiB that a run may grow over its steps: what an allocator keeps of its largest step.
FLAT = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description="What fit costs, and what processes bring.")
    parser.add_argument("--quick", action="store_true", help="little of each; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    steps, repeats, many = (6, 1, 300) if quick else (25, 4, 10_000)
    record = environment.describe("torch", "lightning") | {
        "processes": processes(steps, repeats),
        "overhead": overhead(steps, repeats),
        "memory": memory(many),
    }
    for name, found in record.items():
        if isinstance(found, dict) and "verdict" in found:
            print(f"{name}: {found}")
    if not quick:
        environment.write(RECORD, record)


class Clock:
    """Seconds of every epoch but the first, in which allocators and threads find their size."""

    def __init__(self):
        self.times: list[tuple[float, float]] = []

    def __call__(self, epoch: int, model: nn.Module) -> dict[str, float]:
        self.times.append((time.perf_counter(), time.process_time()))
        return {}

    @property
    def seconds(self) -> list[float]:
        return [after - before for (before, _), (after, _) in pairwise(self.times)]

    @property
    def cpu_seconds(self) -> list[float]:
        return [after - before for (_, before), (_, after) in pairwise(self.times)]


def processes(steps: int, repeats: int) -> dict:
    """Images a second of one process and of two, which alternate."""
    data = images(steps * BATCH_SIZE)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for devices in rates:
            clock = Clock()
            trained(data, epochs=3, devices=devices, on_epoch=clock)
            rates[devices] += [len(data) / seconds for seconds in clock.seconds]
    one, two = (statistics.median(values) for values in rates.values())
    found = {"one": round(one), "two": round(two), "times": round(two / one, 3)}
    return found | {"must": TIMES_FASTER, "verdict": verdict(two / one >= TIMES_FASTER)}


def overhead(steps: int, repeats: int) -> dict:
    """How much longer an epoch of `fit` takes than one of a bare loop."""
    data = images(steps * BATCH_SIZE)
    ratios, cpu_ratios = [], []
    for _ in range(repeats):
        clock, bare = Clock(), Clock()
        trained(data, epochs=3, on_epoch=clock)
        bare_epochs(data, 3, bare)
        ratios.append(statistics.median(clock.seconds) / statistics.median(bare.seconds))
        cpu_ratios.append(
            statistics.median(clock.cpu_seconds) / statistics.median(bare.cpu_seconds)
        )
    more = statistics.median(ratios) - 1
    found = {"more": round(more, 4), "lower": round(min(ratios) - 1, 4)}
    found |= {"upper": round(max(ratios) - 1, 4)}
    found |= {"cpu_time": round(statistics.median(cpu_ratios) - 1, 4), "must": MOST_OVERHEAD}
    return found | {"verdict": verdict(more <= MOST_OVERHEAD)}


def memory(steps: int) -> dict:
    """Resident memory of a small network over many steps, in MiB, once it has settled."""
    resident = []
    process = psutil.Process()
    batch, epochs = 32, 20
    data = images(steps // epochs * batch)

    def look(epoch: int, model: nn.Module) -> dict[str, float]:
        resident.append(process.memory_info().rss / 2**20)
        return {}

    model = nn.Sequential(nn.Flatten(), zm.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(epochs=epochs, batch_size=batch)
        fit(model, data, config, folder=folder, on_epoch=look, accelerator="cpu", progress=False)
    settled = resident[len(resident) // 4 :]
    grown = settled[-1] - settled[0]
    found = {"steps": steps, "first": round(settled[0], 1), "last": round(settled[-1], 1)}
    return found | {"must": FLAT, "verdict": verdict(grown <= FLAT)}


def images(num: int) -> ImageSet:
    torch.manual_seed(0)
    return ImageSet(torch.rand(num, 1, 28, 28), torch.randint(10, (num,)), num_classes=10)


def network() -> nn.Module:
    torch.manual_seed(0)
    return lenet5(dense1=zm.Linear)


def trained(data: ImageSet, *, epochs: int, devices: int = 1, on_epoch: Clock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fit(
            network(),
            data,
            TrainingConfig(epochs=epochs, batch_size=BATCH_SIZE),
            folder=folder,
            devices=devices,
            accelerator="cpu",
            on_epoch=on_epoch,
            progress=False,
        )


def bare_epochs(data: ImageSet, epochs: int, clock: Clock) -> None:
    """The loop that a user would write."""
    model = network()
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=1e-3), fused=True)
    batches = Batches(data, BATCH_SIZE, seed=0)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for x, y in batches:
            nll = F.cross_entropy(model(x), y)
            loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=len(data))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        clock(epoch + 1, model)


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


if __name__ == "__main__":
    main()
