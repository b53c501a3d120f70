"""What a mini-batch is: inputs of a model, and targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zeromean.arguments import shown
from zeromean.prediction.inputs import as_arguments, logits_in

# What loaders of mappings call the targets; Hugging Face's say labels.
TARGETS = ("labels", "targets", "label", "target")


def split_batch(batch: Any) -> tuple[Any, Tensor]:
    """Inputs and targets of a batch: a pair, or a mapping with `labels` or `targets` in it.

    Several positional arguments come as a tuple, of which collating makes a list.
    """
    if isinstance(batch, Mapping):
        name = next((name for name in TARGETS if name in batch), None)
        if name is not None:
            inputs = {key: value for key, value in batch.items() if key != name}
            return inputs, _targets(batch[name])
    elif isinstance(batch, (list, tuple)) and len(batch) == 2:
        inputs, targets = batch
        return _tupled(inputs), _targets(targets)
    raise TypeError(
        "A batch must be (inputs, targets), or a mapping of the model's arguments with the targets "
        f"under one of {', '.join(TARGETS)}; got {_described(batch)}."
    )


def outputs_of(model: nn.Module, inputs: Any) -> Tensor:
    """Call the model with a tensor, a tuple of positional or a mapping of keyword arguments."""
    args, kwargs = as_arguments(_tupled(inputs))
    outputs = logits_in(model(*args, **kwargs))
    if not isinstance(outputs, Tensor):
        raise TypeError(
            "The model must return a tensor, or something with a tensor called logits, got a "
            f"{type(outputs).__name__}; wrap it in a module that picks one."
        )
    return outputs


def first_rows(inputs: Any, count: int) -> Any:
    """So many examples; where there are fewer, some come again."""

    def rows(tensor: Tensor) -> Tensor:
        times = math.ceil(count / len(tensor))
        if times > 1:
            tensor = tensor.repeat(times, *[1] * (tensor.dim() - 1))
        return tensor[:count]

    return tree_map_only(Tensor, rows, inputs)


def _tupled(inputs: Any) -> Any:
    return tuple(inputs) if isinstance(inputs, list) else inputs


def _targets(targets: Any) -> Tensor:
    if isinstance(targets, Tensor) and targets.dim() > 0:
        return targets
    raise TypeError(
        f"targets must be a tensor with a row for each example, got {shown(targets)}; let the "
        "loader collate them into one."
    )


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping of {', '.join(map(str, batch))}"
    if isinstance(batch, (list, tuple)):
        return f"{len(batch)} things"
    return shown(batch)
