"""What an epoch of `zeromean.training.fit` costs compared with a bare deterministic PyTorch loop.

    OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 \
        .venv/bin/python benchmarks/training_loop.py

LeNet-5 as the authors of variance networks ran it, batches of 200 of MNIST-shaped noise. The
subject has a zero-mean dense1 and everything around an epoch: Lightning, batches, logs, checkpoint.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import cpu_ratio

import zeromean as zm
from zeromean.data import Batches, ImageSet
from zeromean.models.lenet import lenet5
from zeromean.training import TrainingConfig, fit

BATCH_SIZE = 200
MOST_TIMES_THE_BARE_LOOP = 1.3
LARGEST_INPUT_SHARE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description="The training loop compared with a bare one.")
    parser.add_argument("--images", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    labels = torch.randint(0, 10, (arguments.images,))
    data = ImageSet(torch.rand(arguments.images, 1, 28, 28), labels, num_classes=10)
    ratio = cpu_ratio(
        lambda: trained_epoch(data), lambda: bare_epoch(data), repeats=arguments.repeats, budget=600
    )
    share = 1e3 * seconds_of_input(data) / ratio.subject_ms
    print(f"bare loop      {ratio.floor_ms:7.0f} ms an epoch of {arguments.images} images")
    print(f"zeromean.fit   {ratio.subject_ms:7.0f} ms")
    print(
        f"ratio          {ratio.median:7.2f} ({ratio.lower:.2f} to {ratio.upper:.2f}, "
        f"{ratio.repeats} pairs; at most {MOST_TIMES_THE_BARE_LOOP})"
    )
    print(f"input pipeline {share:7.1%} of it (less than {LARGEST_INPUT_SHARE:.0%})")


def trained_epoch(data: ImageSet) -> None:
    model = lenet5(dense1=zm.Linear)
    config = TrainingConfig(epochs=1, batch_size=BATCH_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        fit(model, data, config, folder=Path(folder), progress=False)


def bare_epoch(data: ImageSet) -> None:
    model = lenet5()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = torch.randperm(len(data))
    for index in order.split(BATCH_SIZE):
        loss = F.cross_entropy(model(data.images[index]), data.labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def seconds_of_input(data: ImageSet) -> float:
    """CPU time of an epoch's batches alone."""
    start = time.process_time()
    for _ in Batches(data, BATCH_SIZE, seed=0):
        pass
    return time.process_time() - start


if __name__ == "__main__":
    main()
