"""Outputs of random networks, sample by sample.

Inside a prediction BatchNorm uses its running statistics and torch's Dropout modules stay on
(Monte-Carlo dropout); the modes are restored afterwards. The function `F.dropout(x, p,
self.training)` goes by the mode of the module that calls it, which is eval: make it a module.

Noise must come from torch: a draw of Python's or numpy's generators inside the model is the same
for all samples. Threads that predict at the same time need a copy of the model each; with seeds
they wait for each other, and what other threads draw meanwhile without one is not reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from zeromean.prediction.inputs import InputsOrLoader
from zeromean.prediction.monte_carlo import Consumer, draw_outputs
from zeromean.prediction.sources import Source
from zeromean.samplers.sampler import Sampler


def sample_outputs(
    model: Source,
    inputs: InputsOrLoader,
    num_samples: int = 20,
    *,
    sampler: Sampler | Literal["auto"] | None = None,
    seed: int | None = None,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    select: Callable[[Any], Tensor] | None = None,
    devices: int | None = None,
    differentiable: bool = False,
) -> Tensor:
    """Outputs of the random network, `(num_samples, batch, …)`; of several, one after the other.

    With `sampler=zm.weight` each sample is one network applied to the whole batch, also where a
    layer is called twice.

    Args:
        model: Any module. What it draws noise with, stochastic layers and Dropout, is on. Or
            several networks that count alike, each with `num_samples` draws: a list of modules
            (an ensemble), or `zm.States` (one architecture, many stored weights).
        inputs: A tensor, a tuple of positional or a mapping of keyword arguments. Or a DataLoader
            that gives one of these, or `(inputs, targets)`, a batch, in a fixed order: it is read
            once, and its inputs are kept in memory.
        num_samples: Draws of the noise.
        sampler: How every stochastic layer draws, in place of its own way (`zm.weight`, `zm.mean`,
            …); "auto" lets dense layers on vectors draw weights where that is cheaper.
        seed: Makes the draw reproducible, for the same model, inputs, chunk and batch size, without
            touching the global generator.
        chunk_size: Samples that run at once. Default: so many that more samples need no more
            memory.
        batch_size: Examples, along dimension 0 of inputs and outputs, that run at once. Default:
            all. A sample is one network for all of them where weights are drawn (`zm.weight`).
            Inputs whose length is that of the first one are split alike, others go to every batch
            as they are. One that only happens to be as long, and is not by example, needs
            `unsqueeze(0)`.
        select: Picks a tensor from what the model returns. Default: the tensor itself, or what is
            called `logits` in a mapping, a named tuple or a dataclass (Hugging Face's outputs).
        devices: Processes that share the samples; with a seed the numbers do not depend on how many
            there are. A script needs `if __name__ == "__main__":`.
        differentiable: Keep the graph, for gradients through the samples.
    """
    chunks: list[Tensor] = []
    draw_outputs(
        model,
        inputs,
        num_samples,
        lambda _: Consumer(take=chunks.append),
        sampler=sampler,
        seed=seed,
        chunk_size=chunk_size,
        batch_size=batch_size,
        select=select,
        devices=devices,
        differentiable=differentiable,
    )
    return torch.cat(chunks)
