"""Recurrent layers, which have no moments: a weight does the same at all steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeromean.layers.recurrent import RecurrentLayer
from zeromean.moments.rules import NoRuleError, register


@register(RecurrentLayer)
def _random_weights(module: Any, *_: Any) -> Tensor:
    raise NoRuleError(
        f"{type(module).__name__} draws its weights once for all steps, so that the steps are far "
        "from independent; use method='samples'."
    )


@register(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _random_inputs(*_: Any, **__: Any) -> Tensor:
    raise NoRuleError(
        "A recurrent layer carries the noise of its input from step to step, so that the steps are "
        "far from independent; use method='samples'."
    )
