"""What a network is wrapped in: a temperature for classes, log-variances for a regression."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.prediction.inputs import logits_in


class Tempered(nn.Module):
    """A classifier whose logits are divided by a temperature.

    Attributes:
        model: The classifier.
        temperature: Above 1 it makes predictions less sure.
    """

    temperature: Tensor

    def __init__(self, model: nn.Module, temperature: float = 1.0):
        super().__init__()
        self.model = model
        self.register_buffer("temperature", torch.tensor(float(temperature)))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        logits = logits_in(self.model(*args, **kwargs))
        return logits / self.temperature.to(logits.dtype)

    def extra_repr(self) -> str:
        return f"temperature={float(self.temperature):.3g}"


class WithVariance(nn.Module):
    """A regression that returns means, then log-variances, in its last dimension.

    As `zm.HeteroscedasticGaussianLikelihood` wants it.

    Attributes:
        model: Returns means, or means and log-variances.
        log_variance: Added to the log-variances; where the model has none it is all there is.
        num_outputs: Means.
    """

    log_variance: Tensor

    def __init__(self, model: nn.Module, num_outputs: int, log_variance: Tensor | float = 0.0):
        super().__init__()
        self.model = model
        self.num_outputs = num_outputs
        offset = torch.as_tensor(log_variance, dtype=torch.float32).expand(num_outputs).clone()
        self.register_buffer("log_variance", offset)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        outputs = logits_in(self.model(*args, **kwargs))
        mean, log_variance = outputs[..., : self.num_outputs], outputs[..., self.num_outputs :]
        offset = self.log_variance.to(outputs.dtype)
        log_variance = log_variance + offset if log_variance.shape[-1] else offset.expand_as(mean)
        return torch.cat([mean, log_variance], -1)


def smallest(function: Callable[[float], float], low: float, high: float, steps: int = 30) -> float:
    """Where a function with one minimum between two numbers has it (golden section)."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2
