"""Averages of the weights that a training passes through, and draws around them.

Izmailov et al. (2018), "Averaging weights leads to wider optima and better generalization" (SWA);
Maddox et al. (2019), "A simple baseline for Bayesian uncertainty in deep learning" (SWAG).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.arguments import require_integer, require_model, require_numbers, require_seed
from zeromean.conversion.batchnorm import batchnorms, recalibrate_batchnorm_


class SWA:
    """Stochastic weight averaging: the mean of the parameters at the times of `update()`.

    Args:
        model: The model that is trained; it is left as it is. Tied parameters count once.
    """

    def __init__(self, model: nn.Module):
        require_model(model)
        self.model = model
        self.count = 0
        self.means = {
            name: torch.zeros_like(parameter, dtype=_wide(parameter))
            for name, parameter in _averaged(model).items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters in as they are now, at the end of an epoch, say."""
        self.count += 1
        for name, parameter in _averaged(self.model).items():
            mean = self.means[name]
            mean += (parameter - mean) / self.count

    def network(self, batches: Any = None, *, max_batches: int | None = None) -> nn.Module:
        """A copy of the model with the average for its parameters.

        Args:
            batches: Training inputs, as `zm.recalibrate_batchnorm_` takes them. A model with
                BatchNorm needs them: its running statistics are those of other weights.
        """
        _require_updates(self.count, 1)
        network = copy.deepcopy(self.model).eval()
        _fill_(network, self.means)
        _recalibrate_(network, batches, max_batches)
        return network

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on."""
        return {"count": self.count, "means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])
        for name, mean in self.means.items():
            mean.copy_(state["means"][name])


class SWAG:
    """Diagonal SWAG: a Gaussian around the average of the parameters, with their own variances.

    Args:
        model: The model that is trained; it is left as it is.
    """

    def __init__(self, model: nn.Module):
        self.average = SWA(model)
        self.squares = {name: torch.zeros_like(m) for name, m in self.average.means.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters in as they are now, at the end of an epoch, say."""
        # Welford (1962): the difference of two large numbers would have few digits left.
        before = {name: mean.clone() for name, mean in self.average.means.items()}
        self.average.update()
        for name, parameter in _averaged(self.average.model).items():
            self.squares[name] += (parameter - before[name]) * (
                parameter - self.average.means[name]
            )

    def variances(self) -> dict[str, Tensor]:
        """The variance of every parameter over the updates."""
        _require_updates(self.average.count, 2)
        count = self.average.count
        return {name: (total / count).clamp_min(0) for name, total in self.squares.items()}

    def network(self, batches: Any = None, *, max_batches: int | None = None) -> nn.Module:
        """The mean alone, as `SWA.network` gives it."""
        return self.average.network(batches, max_batches=max_batches)

    def draws(
        self,
        num_networks: int = 20,
        *,
        seed: int = 0,
        scale: float = 1.0,
        batches: Any = None,
        max_batches: int | None = None,
    ) -> Draws:
        """Networks drawn from the Gaussian, for `zm.predict_proba` and the like.

        Args:
            seed: The same one gives the same networks, as often as they are asked for.
            scale: What the variances are multiplied with.
            batches: Training inputs, as `zm.recalibrate_batchnorm_` takes them, which every network
                of a model with BatchNorm goes through.
        """
        num_networks = require_integer("num_networks", num_networks, at_least=1)
        seed = require_seed(seed)
        require_numbers(scale=scale)
        if not 0 <= scale < math.inf:
            raise ValueError(f"scale must be at least 0, got {scale}.")
        _require_batches(self.average.model, batches)
        return Draws(self, num_networks, seed, scale, batches, max_batches)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on."""
        return {**self.average.state_dict(), "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)
        for name, total in self.squares.items():
            total.copy_(state["squares"][name])


class Draws:
    """Networks drawn around an average of weights: a source for predictions; see `SWAG.draws`."""

    def __init__(
        self,
        swag: SWAG,
        num_networks: int,
        seed: int,
        scale: float,
        batches: Any,
        max_batches: int | None,
    ):
        self.model = swag.average.model
        self.means = {name: mean.clone() for name, mean in swag.average.means.items()}
        self.stds = {name: (scale * v).sqrt() for name, v in swag.variances().items()}
        self.num_networks = num_networks
        self.seed = seed
        self.batches = batches
        self.max_batches = max_batches

    def __len__(self) -> int:
        return self.num_networks

    def __iter__(self) -> Iterator[nn.Module]:
        """The networks one after the other, each valid until the next is asked for."""
        network = copy.deepcopy(self.model).eval()
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.num_networks):
            drawn = {}
            for name, mean in self.means.items():
                # By a generator of the CPU: the same networks on every device.
                noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
                drawn[name] = mean + self.stds[name] * noise.to(mean.device)
            _fill_(network, drawn)
            _recalibrate_(network, self.batches, self.max_batches)
            yield network


def _averaged(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is averaged, by its first name: buffers are not, as BatchNorm's are no weights."""
    return {name: p for name, p in model.named_parameters() if p.is_floating_point()}


def _wide(parameter: Tensor) -> torch.dtype:
    """A type in which small steps do not get lost."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


@torch.no_grad()
def _fill_(network: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in _averaged(network).items():
        parameter.copy_(values[name])


def _recalibrate_(network: nn.Module, batches: Any, max_batches: int | None) -> None:
    _require_batches(network, batches)
    if batchnorms(network):
        recalibrate_batchnorm_(network, batches, max_batches=max_batches)


def _require_batches(model: nn.Module, batches: Any) -> None:
    if batches is None and batchnorms(model):
        raise ValueError(
            "The model has BatchNorm, whose running statistics are not those of averaged weights; "
            "pass batches=, some training inputs or a loader of them."
        )


def _require_updates(count: int, needed: int) -> None:
    if count < needed:
        what = "An average needs one update" if needed == 1 else "Variances need two updates"
        raise ValueError(f"{what} at least, got {count}; call update() while the model trains.")
