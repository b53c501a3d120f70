"""Small networks on small data, trained in seconds by a plain loop that can be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromean as zm
from zeromean.training.checkpoint import DamagedError, load_tensors, save_tensors

HIDDEN = 100


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's digits as rows of 64 pixels: training images and labels, then the test's."""
    from zeromean import data

    train, test = data.load("digits", "train"), data.load("digits", "test")
    return train.images.flatten(1), train.labels, test.images.flatten(1), test.labels


def digits_network(layer: Callable[..., nn.Module]) -> nn.Sequential:
    """Three dense layers with BatchNorm; the middle one is made by `layer`."""
    return nn.Sequential(
        nn.Linear(64, HIDDEN, bias=False),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        layer(HIDDEN, HIDDEN, bias=False),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 10),
    )


def train(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    before_step: Callable[[int], Any] | None = None,
    checkpoint: Path | None = None,
    every: int = 500,
) -> None:
    """Minimise the negative ELBO with Adam, its learning rate falling linearly to zero.

    Args:
        before_step: Called with the number of every step, for schedules and for looking on.
        checkpoint: File to go on from, and to save to `every` so many steps.
    """
    num_data = len(inputs)
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=lr), eps=1e-8 / num_data)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    first = 0
    if checkpoint is not None and checkpoint.exists():
        first = _restore(checkpoint, model, optimizer, schedule)
    batches = _batches(num_data, batch_size, first)
    model.train()
    for step in range(first, steps):
        if checkpoint is not None and step > first and step % every == 0:
            _save(checkpoint, step, model, optimizer, schedule)
        if before_step is not None:
            before_step(step)
        batch = next(batches)
        nll = F.cross_entropy(model(inputs[batch]), labels[batch])
        loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=num_data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Per cent of examples whose highest score `(examples, classes)` is at their label."""
    return 100 * (scores.argmax(-1) == labels).double().mean().item()


def _batches(num_data: int, batch_size: int, first: int) -> Iterator[Tensor | slice]:
    """Endless mini-batches, each epoch's order given by its number alone; from step `first` on."""
    if batch_size >= num_data:
        while True:
            yield slice(None)
    per_epoch = num_data // batch_size
    epoch, offset = divmod(first, per_epoch)
    while True:
        order = torch.randperm(num_data, generator=torch.Generator().manual_seed(epoch))
        yield from order[: per_epoch * batch_size].view(per_epoch, batch_size)[offset:]
        epoch, offset = epoch + 1, 0


def _save(path: Path, step: int, model: nn.Module, optimizer: Any, schedule: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "generator": torch.get_rng_state(),
    }
    state["schedule"] = {k: v for k, v in state["schedule"].items() if k != "lr_lambdas"}
    save_tensors(path, state)


def _restore(path: Path, model: nn.Module, optimizer: Any, schedule: Any) -> int:
    try:
        state = load_tensors(path)
    except DamagedError as error:
        raise ValueError(f"{error} Remove it.") from error
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.__dict__.update(state["schedule"])
    torch.set_rng_state(state["generator"])
    return state["step"]
