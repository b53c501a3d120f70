"""Predictions for many rows: block by block, so that memory stays that of one block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeromean.arguments import require_integer, require_seed
from zeromean.commands.networks import load_network
from zeromean.layers.embedding import Embedding
from zeromean.layers.stochastic_module import StochasticModule
from zeromean.prediction.options import require_several
from zeromean.prediction.parallel import Turn, alone, shared_turns
from zeromean.prediction.probabilities import Link, OutputKind, ToProbabilities, cross_entropy
from zeromean.prediction.regression import NoiseModel, predict_moments
from zeromean.prediction.samples import sample_outputs
from zeromean.registry import SAMPLERS
from zeromean.samplers.sampler import Sampler

# What is predicted for a block of rows, by name.
Columns = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How the outputs of a block of rows are drawn."""

    num_samples: int
    seed: int
    batch_size: int
    sampler: Sampler | None
    device: torch.device

    def __post_init__(self):
        require_integer("--num-samples", self.num_samples, at_least=1)
        require_integer("--batch-size", self.batch_size, at_least=1)
        require_seed(self.seed)

    def options(self, block: int) -> dict[str, Any]:
        # One seed for all blocks would give each of them the same noise.
        return {
            "num_samples": self.num_samples,
            "seed": self.seed + block,
            "sampler": self.sampler,
        }


def sampler_named(name: str) -> Sampler | None:
    """A sampler by its name; None for "own", the layers' own."""
    return None if name == "own" else SAMPLERS[name]


@dataclass(frozen=True, kw_only=True)
class Classification:
    """Probabilities, the class, and how uncertain it is, in nats."""

    link: Link = "softmax"
    outputs: OutputKind | None = None

    uncertainty = "predictive_entropy"

    def __call__(self, network: nn.Module, inputs: Tensor, options: dict[str, Any]) -> Columns:
        samples = sample_outputs(network, inputs, **options)
        to_probabilities = ToProbabilities(
            network, dim=-1, link=self.link, outputs=self.outputs, num_examples=len(inputs)
        )
        each = to_probabilities(samples)
        to_probabilities.finish()
        average = each.mean(0)
        total = cross_entropy(average, average, self.link, -1)
        expected = cross_entropy(each, each, self.link, -1).mean(0)
        yes_or_no = self.link == "sigmoid"
        return {
            "predicted_class": (average > 0.5).long() if yes_or_no else average.argmax(-1),
            "predictive_entropy": total,
            # Jensen makes the difference non-negative; rounding may not.
            "mutual_information": (total - expected).clamp_min(0),
            "probabilities": average,
        }


@dataclass(frozen=True, kw_only=True)
class Regression:
    """The mean, and standard deviations: of the noise of the targets, and of the mean itself."""

    likelihood: NoiseModel | None = None

    uncertainty = "epistemic_std"

    def __call__(self, network: nn.Module, inputs: Tensor, options: dict[str, Any]) -> Columns:
        require_several("--regression", options["num_samples"])
        moments = predict_moments(network, inputs, likelihood=self.likelihood, **options)
        return {
            "mean": moments.mean,
            "aleatoric_std": moments.aleatoric.sqrt(),
            "epistemic_std": moments.epistemic.sqrt(),
        }


Task = Classification | Regression


@dataclass(frozen=True)
class Work:
    """What a process has to know to predict any block."""

    file: Path
    factory: str | None
    rows: np.ndarray
    task: Task
    drawing: Drawing


@contextmanager
def turns_of(work: Work, devices: int) -> Iterator[Turn]:
    """The turns of this process among so many that share the blocks."""
    if require_integer("--devices", devices, at_least=1) == 1:
        yield alone
        return
    with shared_turns(_help, work, devices) as turn:
        yield turn


def _help(work: Work, turn: Turn) -> None:
    network = load_network(work.file, work.factory)
    for _ in predict_blocks(network, work.rows, work.task, work.drawing, lambda _: None, turn):
        pass


def predict_blocks(
    network: nn.Module,
    rows: np.ndarray,
    task: Task,
    drawing: Drawing,
    look: Callable[[Columns], None],
    turn: Turn = alone,
) -> Iterator[Columns]:
    """What is predicted, a block of rows at a time.

    Args:
        look: Called with what is predicted of the first block, before all others are.
        turn: Which blocks are this process's, where several share them.
    """
    network = network.to(drawing.device)
    dtype = _input_dtype(network)
    starts = range(0, len(rows), drawing.batch_size)

    def predict(block: int, start: int) -> Columns:
        inputs = _tensor(rows[start : start + drawing.batch_size], dtype).to(drawing.device)
        try:
            predicted = task(network, inputs, drawing.options(block))
        except ValueError:
            raise  # It says what to do.
        except Exception as error:  # What networks say of inputs that they cannot take.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"the network cannot take {len(inputs)} rows of shape {tuple(inputs.shape[1:])} "
                f"and type {str(inputs.dtype).removeprefix('torch.')}: {reason}"
            ) from error
        predicted = {name: values.cpu() for name, values in predicted.items()}
        for name, values in predicted.items():
            if values.shape[:1] != inputs.shape[:1]:
                raise ValueError(
                    f"the network must return one output a row, but {name} of {len(inputs)} rows "
                    f"has the shape {tuple(values.shape)}."
                )
        return predicted

    for block, start in enumerate(starts):
        predicted = turn(partial(predict, block, start))
        if predicted is None:
            continue  # Another process's.
        if block == 0:
            look(predicted)
        yield predicted


def _input_dtype(network: nn.Module) -> torch.dtype:
    """What the network reads: indices, where its first layer looks up, else its weights' type."""
    for module in network.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag, Embedding)):
            return torch.int64
        if isinstance(module, StochasticModule) or next(module.parameters(False), None) is not None:
            break
    tensors = (*network.parameters(), *network.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


def _tensor(block: np.ndarray, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int64:
        indices = block.astype(np.int64)
        if (indices != block).any():
            raise ValueError("the network looks up indices, but the data are not whole numbers.")
        return torch.from_numpy(indices)
    # torch knows neither foreign byte orders nor long double.
    wide = np.float64 if dtype == torch.float64 else np.float32
    return torch.from_numpy(np.array(block, dtype=wide)).to(dtype)
