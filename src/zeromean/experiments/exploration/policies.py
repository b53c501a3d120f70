"""The policies of the exploration experiments: how the second hidden layer is made."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

import zeromean as zm

# Standard deviations with which noisy networks start: Fortunato et al. (2017), section 3.2. The
# factorized noise there has variance 2/π in place of 1.
_SIGMA = 0.017
_SIGMA_FACTORIZED = 0.5 * math.sqrt(2 / math.pi)


def _noisy(width: int, sigma: float, noise: Any) -> nn.Module:
    posterior = partial(zm.Additive, log_variance=2 * math.log(sigma), noise=noise)
    return zm.Linear(width, width, posterior=posterior, prior=None, sampler=zm.weight)


# How the second hidden layer of a policy is made, from its width.
METHODS: dict[str, Callable[[int], nn.Module]] = {
    "deterministic": lambda width: nn.Linear(width, width),
    "parameter_noise": lambda width: _noisy(width, _SIGMA, zm.normal),
    "factorized_noise": lambda width: _noisy(
        width, _SIGMA_FACTORIZED / math.sqrt(width), zm.factorized
    ),
    "variance": lambda width: zm.Linear(width, width, sampler=zm.weight),
}


def policy(features: int, actions: int, width: int, method: str) -> nn.Module:
    """A network from features to the scores of actions; `method` is one of METHODS."""
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(features, width),
            activation1=nn.ReLU(),
            second=METHODS[method](width),
            activation2=nn.ReLU(),
            last=nn.Linear(width, actions),
        )
    )


def baseline(features: int) -> nn.Module:
    """A network from features to the value of a state, zero at the start."""
    last = nn.Linear(64, 1)
    # A baseline that starts at random would be what the first updates follow.
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(features, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)
