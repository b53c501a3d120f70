"""`zeromean predict`: predictions of a network in a file, for rows in another."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zeromean.commands.messages import refuse

if TYPE_CHECKING:
    from zeromean.commands.predictions import Task


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Predict with a network in a file: classes with their uncertainty, or a regression.

    A file of export.save_compressed describes its network; that of zm.save needs --model.
    """

    file: Path
    """The network: a file of zm.save or export.save_compressed."""
    data: Path
    """Its inputs, one example a row: .npz, .npy or .csv."""
    out: Path | None = None
    """File for the predictions, .npz or .csv; default: only the table on the terminal."""
    model: str | None = None
    """package.module:function that builds the architecture, for a file of zm.save."""
    key: str | None = None
    """Which array of an .npz; needed where it has several."""
    columns: tuple[str, ...] = ()
    """Which columns of a .csv, by name or by number from 0 on; default: all."""
    num_samples: int = 20
    """Draws of the noise."""
    seed: int = 0
    """Seed of the noise; the rows of the n-th batch have it plus n."""
    batch_size: int = 1000
    """Rows at a time."""
    sampler: Literal["own", "auto", "local", "weight", "flipout", "moment_matched", "mean"] = "own"
    """How stochastic layers draw; "own" is the way they were built with."""
    link: Literal["softmax", "sigmoid"] = "softmax"
    """"softmax" for one of several classes, "sigmoid" where every output says yes or no."""
    outputs: Literal["logits", "probabilities"] | None = None
    """What the network returns; default: logits, unless it proves to be something else."""
    regression: bool = False
    """Mean, aleatoric and epistemic standard deviation in place of classes."""
    heteroscedastic: bool = False
    """In a regression: the second half of the outputs are log-variances of the targets."""
    noise_variance: float | None = None
    """In a regression: the variance of the targets' noise, where it is the same everywhere."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, mps, …"""
    devices: int = 1
    """Processes that share the batches of rows; the numbers do not depend on how many."""
    top: int = 5
    """How many of the most uncertain rows are shown."""
    quiet: bool = False
    """No bar of progress and no table."""

    def run(self) -> int:
        from zeromean.commands import tables
        from zeromean.commands.arrays import read_rows

        task = self._task()
        if self.top < 0:
            return refuse(f"--top must not be negative, got {self.top}.")
        if self.out is not None:
            tables.require_place(self.out, (self.file, self.data))
        rows = read_rows(self.data, self.key, self.columns)
        with _warnings_in_sentences():
            columns = self._predict(task, rows)
        if self.out is not None:
            tables.write(self.out, columns)
        if not self.quiet:
            print(f"{len(rows):,} rows, {self.num_samples} samples")
            average = columns[task.uncertainty].mean()
            print(f"{task.uncertainty.replace('_', ' ')}, on average: {average:.4g}")
            if self.top:
                print("the most uncertain rows:")
                print("\n".join(tables.most_uncertain(columns, task.uncertainty, self.top)))
        if self.out is not None:
            print(f"wrote {self.out}")
        return 0

    def _task(self) -> Task:
        from zeromean.commands.predictions import Classification, Regression
        from zeromean.training.likelihoods import (
            GaussianLikelihood,
            HeteroscedasticGaussianLikelihood,
        )

        if not self.regression:
            if self.heteroscedastic or self.noise_variance is not None:
                raise ValueError("--heteroscedastic and --noise-variance go with --regression.")
            return Classification(link=self.link, outputs=self.outputs)
        if self.link != "softmax" or self.outputs is not None:
            raise ValueError(
                "--link and --outputs are for classes: leave them out, or leave --regression out."
            )
        if self.heteroscedastic and self.noise_variance is not None:
            raise ValueError("--heteroscedastic and --noise-variance exclude each other.")
        likelihood: Any = HeteroscedasticGaussianLikelihood() if self.heteroscedastic else None
        if self.noise_variance is not None:
            likelihood = GaussianLikelihood(noise_variance=self.noise_variance, learn=False)
        return Regression(likelihood=likelihood)

    def _predict(self, task: Task, rows: Any) -> dict[str, Any]:
        import numpy as np

        from zeromean.commands import networks, tables
        from zeromean.commands.predictions import (
            Drawing,
            Work,
            predict_blocks,
            sampler_named,
            turns_of,
        )

        drawing = Drawing(
            num_samples=self.num_samples,
            seed=self.seed,
            batch_size=self.batch_size,
            sampler=sampler_named(self.sampler),
            device=networks.device_named(self.device),
        )
        network = networks.load_network(self.file, self.model)
        work = Work(self.file, self.model, rows, task, drawing)

        def look(first: Any) -> None:
            if self.out is not None:
                tables.require_fitting(self.out, {n: v.numpy() for n, v in first.items()})

        blocks = []
        with _progress(self.quiet, len(rows)) as advance, turns_of(work, self.devices) as turn:
            for block in predict_blocks(network, rows, task, drawing, look, turn):
                blocks.append({name: _as_numpy(values) for name, values in block.items()})
                advance(len(next(iter(block.values()))))
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _as_numpy(values: Any) -> Any:
    import torch

    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


@contextmanager
def _progress(quiet: bool, total: int) -> Iterator[Any]:
    """A bar on the terminal, which is gone when the work is done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=quiet or not console.is_terminal
    ) as progress:
        task = progress.add_task("rows", total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _warnings_in_sentences() -> Iterator[None]:
    """Warnings for people who have not written the code that they would point at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for sentence in dict.fromkeys(" ".join(str(each.message).split()) for each in caught):
        print(f"zeromean: {sentence}", file=sys.stderr)
