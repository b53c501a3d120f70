"""The batches that BatchNorm saw as its randomness: one network for each of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeromean.arguments import require_integer, require_model
from zeromean.conversion.batchnorm import recalibrate_batchnorm_
from zeromean.prediction.sources import States


def monte_carlo_batchnorm(
    model: nn.Module, batches: Iterable[Any], *, max_batches: int | None = None
) -> States:
    """The network with the statistics of one training batch after the other, for predictions.

    Training with BatchNorm draws other examples along with each one; predicting with the statistics
    of many training batches averages over that. Take batches of the size that the network was
    trained with. Teye, Azizpour & Smith (2018). The model is left as it is.

    Args:
        batches: Training batches, as `zm.recalibrate_batchnorm_` takes them.
        max_batches: Stop after so many.
    """
    require_model(model)
    if isinstance(batches, (str, bytes, Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(
            "batches must be several training batches, such as a list of them or a DataLoader, got "
            f"a {type(batches).__name__}; one batch gives one network, use x.split(…)."
        )
    if max_batches is not None:
        max_batches = require_integer("max_batches", max_batches, at_least=1)
    network = copy.deepcopy(model)
    states = []
    for batch in islice(batches, max_batches):
        # In a list of its own: what comes in pairs are inputs and targets.
        recalibrate_batchnorm_(network, [batch])
        states.append(_statistics(network))
    if not states:
        raise ValueError("monte_carlo_batchnorm needs at least one batch, got none.")
    return States(network, states)


def _statistics(network: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{buffer}".lstrip("."): value.clone()
        for name, module in network.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
        for buffer, value in module.named_buffers(recurse=False)
    }
