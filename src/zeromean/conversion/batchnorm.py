"""Running statistics of BatchNorm, estimated anew behind layers that have changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence

from zeromean.arguments import require_integer, require_model, shown
from zeromean.layers.blocks import monte_carlo_modes
from zeromean.prediction.inputs import as_arguments


def recalibrate_batchnorm_(
    model: nn.Module,
    batches: Tensor | Mapping[str, Any] | Iterable[Any],
    *,
    max_batches: int | None = None,
) -> int:
    """Estimate the running statistics of every BatchNorm anew, under the model's noise.

    Call it after changing weights in front of a BatchNorm (zero_mean_, pruning, quantize_ without
    inputs). Stochastic layers draw and Dropout is on, as in training; `with zm.sampling(model,
    zm.mean)` around it is for networks that predict by their means. An error leaves the statistics
    as they were. Returns the number of batches used.

    Args:
        batches: A tensor or a mapping (one batch), or an iterable of inputs or of
            `(inputs, targets)`. Inputs are a tensor, a mapping of keyword arguments or, before
            targets, a tuple of positional ones. Each counts the same; a last one of one example
            is passed over where BatchNorm can make nothing of it.
        max_batches: Stop after so many.
    """
    require_model(model)
    if max_batches is not None:
        max_batches = require_integer("max_batches", max_batches, at_least=1)
    if isinstance(batches, (str, bytes)) or not isinstance(batches, (Tensor, Iterable)):
        raise TypeError(
            f"batches must be a tensor, a mapping or an iterable of batches, got {shown(batches)}."
        )
    norms = batchnorms(model)
    if not norms:
        raise ValueError("The model has no BatchNorm with running statistics to recalibrate.")
    momenta = [norm.momentum for norm in norms]
    statistics = _statistics(norms)
    count = 0
    too_small: ValueError | None = None
    try:
        with monte_carlo_modes(model), torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # A cumulative average: every batch counts the same.
                norm.training = True
            one = isinstance(batches, (Tensor, Mapping))
            for batch in islice([batches] if one else batches, max_batches):
                inputs: Any = batch
                if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
                    inputs = batch[0]
                args, kwargs = as_arguments(inputs)
                so_far = _statistics(norms)
                try:
                    model(*args, **kwargs)
                    count += 1
                except ValueError as error:
                    if "more than 1 value per channel" not in str(error):
                        raise
                    too_small = error
                    _restore_(norms, so_far)
        if count == 0:
            got = "none" if too_small is None else "batches of one example only"
            raise ValueError(
                f"recalibrate_batchnorm_ needs at least one batch, got {got}."
            ) from too_small
    except BaseException:
        _restore_(norms, statistics)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return count


def batchnorms(model: nn.Module) -> list[_BatchNorm]:
    """Every BatchNorm with running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def _statistics(norms: list[_BatchNorm]) -> list[dict[str, Tensor]]:
    return [copy.deepcopy(dict(norm.named_buffers())) for norm in norms]


def _restore_(norms: list[_BatchNorm], statistics: list[dict[str, Tensor]]) -> None:
    for norm, before in zip(norms, statistics, strict=True):
        for name, buffer in norm.named_buffers():
            buffer.copy_(before[name])
