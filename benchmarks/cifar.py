"""What training the VGG-like network on CIFAR costs, by its width.

    OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 \
        .venv/bin/python benchmarks/cifar.py --output results/cifar_speed.json

A step of the variance network (dense1 and the last three convolutions stochastic) next to one of
the deterministic network, in turn, and the share of a step that goes to preparing its batch, by
width. Images are noise: what is measured does not depend on them. `--quick` takes fewer steps.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import environment
import torch
import torch.nn.functional as F
from harness import Ratio, cpu_ratio

import zeromean as zm
from zeromean.data import Batches, ImageSet, ShiftAndAlternate
from zeromean.models import vgg_like
from zeromean.training import ElboModule, TrainingConfig
from zeromean.training.precision import autocast, computes_in_bfloat16

BATCH_SIZE, EPOCH = 128, 45_000
WIDTHS = (0.25, 0.5, 1.0)
MOST_TIMES_DETERMINISTIC = 1.15
LARGEST_INPUT_SHARE = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description="Training on CIFAR, by the network's width.")
    parser.add_argument("--widths", type=float, nargs="+", default=WIDTHS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--quick", action="store_true", help="three pairs of steps for each width")
    parser.add_argument("--output", type=Path, help="write the record here")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else arguments.repeats
    precision = arguments.precision
    if precision == "auto":
        precision = "bfloat16" if computes_in_bfloat16() else "float32"

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = ImageSet(torch.rand(20 * BATCH_SIZE, 3, 32, 32), torch.arange(20 * BATCH_SIZE) % 10, 10)
    input_ms = 1e3 * seconds_of_input(data)
    print(f"input pipeline {input_ms:.2f} ms a batch; {precision}, batches of {BATCH_SIZE}")
    rows = []
    for width in arguments.widths:
        ratio = cpu_ratio(
            training_step(width, precision, data, variance=True),
            training_step(width, precision, data, variance=False),
            repeats=repeats,
            budget=600,
        )
        rows.append(row(width, ratio, input_ms))
        print(sentence(rows[-1]))
    if arguments.output:
        record = environment.describe("torch") | {
            "threads": 1,
            "precision": precision,
            "batch_size": BATCH_SIZE,
            "bounds": {"variance": MOST_TIMES_DETERMINISTIC, "input": LARGEST_INPUT_SHARE},
            "rows": rows,
        }
        environment.write(arguments.output, record)


def training_step(
    width: float, precision: Any, data: ImageSet, *, variance: bool
) -> Callable[[], None]:
    """A step as `zeromean.training.fit` takes it, on one batch."""
    make: dict[str, Any] = {}
    if variance:
        posterior = partial(zm.Multiplicative, log_alpha=-10.0)
        convs = dict.fromkeys(("conv11", "conv12", "conv13"), zm.Conv2d)
        make = {
            name: partial(layer, posterior=posterior, prior=zm.LogUniform())
            for name, layer in {**convs, "dense1": zm.Linear}.items()
        }
    model = vgg_like(width, **make).to(memory_format=torch.channels_last)
    config = TrainingConfig(
        epochs=1, optimizer="sgd", lr=0.01, log_alpha_lr=0.03, weight_decay=5e-4
    )
    module = ElboModule(model, config, num_data=EPOCH, steps_per_epoch=1)
    (optimizer,), _ = module.configure_optimizers()
    images, labels = data.images[:BATCH_SIZE], data.labels[:BATCH_SIZE]

    def step() -> None:
        with autocast(precision, "cpu"):
            outputs = model(images)
        nll = F.cross_entropy(outputs.float(), labels)
        loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=EPOCH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds_of_input(data: ImageSet) -> float:
    """CPU time of preparing a batch, as in training."""
    batches = Batches(data, BATCH_SIZE, seed=0, augment=ShiftAndAlternate(4))
    for _ in batches:  # The first time allocates.
        pass
    start = time.process_time()
    for _ in batches:
        pass
    return (time.process_time() - start) / len(batches)


def row(width: float, ratio: Ratio, input_ms: float) -> dict[str, Any]:
    minutes = EPOCH / BATCH_SIZE / 60e3
    return {
        "width": width,
        "variance": asdict(ratio),
        "input_ms": input_ms,
        "input_share": input_ms / (input_ms + ratio.floor_ms),
        "minutes_a_pass": {
            "deterministic": minutes * (input_ms + ratio.floor_ms),
            "variance": minutes * (input_ms + ratio.subject_ms),
        },
    }


def sentence(row: dict[str, Any]) -> str:
    ratio, passes = row["variance"], row["minutes_a_pass"]
    return (
        f"width {row['width']:<5g} variance {ratio['median']:.2f} "
        f"[{ratio['lower']:.2f}, {ratio['upper']:.2f}] of deterministic (at most "
        f"{MOST_TIMES_DETERMINISTIC}), input {row['input_share']:.1%} (less than "
        f"{LARGEST_INPUT_SHARE:.0%}); {passes['deterministic']:.1f} and {passes['variance']:.1f} "
        f"minutes a pass of {EPOCH} images"
    )


if __name__ == "__main__":
    main()
