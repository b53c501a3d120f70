"""Samplers whose noise stays: drawn before by `zm.held_noise`, or once in a prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from zeromean.arguments import shown
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.samplers.linear_maps import LinearMap

Noise = dict[str, Tensor]


class KeptNoise(ABC):
    """A sampler that keeps its noise between calls; recurrent layers and units ask it for noise."""

    @abstractmethod
    def noise_of(self, distribution: nn.Module, x: Tensor) -> Tensor:
        """The noise for a batch of inputs."""

    @abstractmethod
    def one_weight(self, posterior: Posterior) -> Tensor:
        """One weight for the whole batch, for layers that can use no other."""

    @abstractmethod
    def __call__(
        self, op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None
    ) -> Tensor:
        """op(x, w) with the weight that the noise gives."""

    def with_bias(self, op: LinearMap, output: Tensor, x: Tensor, bias: Posterior) -> Tensor:
        """The output of a map, and the bias that the noise gives."""
        drawn = bias(self.noise_of(bias, x))
        if drawn.dim() == len(bias.shape):
            return output + op.align_bias(drawn).to(output.dtype)
        aligned = torch.func.vmap(op.align_bias)(drawn)  # One for each example.
        between = [1] * (output.dim() - aligned.dim())
        aligned = aligned.reshape(len(aligned), *between, *aligned.shape[1:])
        return output + aligned.to(output.dtype)


class HeldNoise(KeptNoise):
    """The noise of a model, to be used again at every call.

    It is a sampler: `sampler(op, x, posterior, bias)` applies the weight that the held noise gives
    with the parameters as they are at the time of the call, so that gradients reach them.

    Attributes:
        noise: The noise of every random weight (`"fc1.weight"`) or unit (`"dropout.units"`).
        num_objects: With it the noise of every tensor has as many rows in front, one for each
            example of a batch; None: one draw for all.
    """

    def __init__(self, distributions: Mapping[str, nn.Module], num_objects: int | None):
        self.num_objects = num_objects
        self._distributions = dict(distributions)
        self._names = {distribution: name for name, distribution in distributions.items()}
        self.noise: Noise = {}

    def redraw(self, objects: Tensor | None = None) -> None:
        """Draw the noise anew.

        Args:
            objects: Which examples get new noise: indices, or True for each of them. Default: all.
        """
        if objects is None:
            self.noise = {
                name: draw(distribution, self.num_objects)
                for name, distribution in self._distributions.items()
            }
            return
        if self.num_objects is None:
            raise ValueError(
                "redraw(objects) needs noise of its own for every example: "
                "zm.held_noise(model, num_objects=…)."
            )
        chosen = _indices(torch.as_tensor(objects), self.num_objects)
        if len(chosen) == 0:
            return
        # Not in place: a graph, or a caller, may still need the noise as it was.
        noise = {}
        for name, distribution in self._distributions.items():
            fresh = draw(distribution, len(chosen))
            noise[name] = self.noise[name].index_copy(0, chosen.to(fresh.device), fresh)
        self.noise = noise

    def hold(self, noise: Noise) -> None:
        """Hold noise that was drawn elsewhere, by `zm.draw_noise`."""
        if not isinstance(noise, Mapping) or not all(isinstance(n, Tensor) for n in noise.values()):
            raise TypeError(
                f"noise must be what zm.draw_noise(model) returns, tensors by name, got "
                f"{shown(noise)}."
            )
        if noise.keys() != self._distributions.keys():
            raise ValueError(
                f"The model needs noise for {_listed(self._distributions)}, got it for "
                f"{_listed(noise)}; draw it with zm.draw_noise(model)."
            )
        for name, distribution in self._distributions.items():
            wanted = _shapes(distribution, self.num_objects)
            if tuple(noise[name].shape) not in wanted:
                raise ValueError(
                    f"The noise of {name} must have shape {wanted[0]}, got "
                    f"{tuple(noise[name].shape)}. With num_objects=n hold zm.draw_noise(model, n); "
                    "without, one draw, or several of them under torch.func.vmap."
                )
        self.noise = dict(noise)

    def noise_of(self, distribution: nn.Module, x: Tensor) -> Tensor:
        if self.num_objects is not None and x.shape[:1] != (self.num_objects,):
            raise ValueError(
                f"The noise is held for {self.num_objects} examples, got an input of shape "
                f"{tuple(x.shape)}; its first dimension must be the examples."
            )
        return self.noise[self._names[distribution]]

    def one_weight(self, posterior: Posterior) -> Tensor:
        if self.num_objects is not None:
            raise ValueError(
                "Recurrent layers cannot hold noise of its own for every example; use torch.func."
                "vmap over examples with zm.draw_noise and zm.held_noise(model, noise) inside."
            )
        return posterior(self.noise[self._names[posterior]])

    def __call__(
        self, op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None
    ) -> Tensor:
        weight = posterior(self.noise_of(posterior, x))
        return op(x, weight, bias) if self.num_objects is None else op.each(x, weight, bias)


class DrawnOnce(KeptNoise):
    """Weights, and noise of units, that are drawn when they are first needed and then stay."""

    def __init__(self):
        self._drawn: dict[nn.Module, Tensor] = {}

    def forget(self) -> None:
        """Draw anew from here on: another network."""
        self._drawn.clear()

    def noise_of(self, distribution: nn.Module, x: Tensor) -> Tensor:
        return self._once(distribution, lambda: draw(distribution, None))

    def one_weight(self, posterior: Posterior) -> Tensor:
        return self._once(posterior, posterior.sample)

    def __call__(
        self, op: LinearMap, x: Tensor, posterior: Posterior, bias: Tensor | None = None
    ) -> Tensor:
        return op(x, self.one_weight(posterior), bias)

    def _once(self, distribution: nn.Module, draw_it: Callable[[], Tensor]) -> Tensor:
        if distribution not in self._drawn:
            self._drawn[distribution] = draw_it()
        return self._drawn[distribution]


def draw(distribution: nn.Module, count: int | None) -> Tensor:
    """Noise of a posterior or of units, once or `count` times along a new first dimension."""
    if not isinstance(distribution, Posterior):  # Units, whose noise has a dimension of examples.
        return distribution.draw_noise(count or 1)  # pyright: ignore[reportCallIssue]
    if count is None:
        return distribution.draw_noise()
    return torch.stack([distribution.draw_noise() for _ in range(count)])


def _shapes(distribution: nn.Module, count: int | None) -> list[tuple[int, ...]]:
    """Shapes that noise may have; the first is that of `draw`."""
    if isinstance(distribution, Posterior):
        return [(*([] if count is None else [count]), *distribution.shape)]
    units = int(distribution.num_features)  # pyright: ignore[reportArgumentType]
    # The other one is what vmap sees of several draws.
    return [(count or 1, units), *([(units,)] if count is None else [])]


def _indices(objects: Tensor, num_objects: int) -> Tensor:
    """Which examples are meant, by indices or by True for each of them."""
    objects = objects.cpu().flatten()
    if objects.dtype == torch.bool:
        if len(objects) != num_objects:
            raise ValueError(
                f"redraw needs True or False for each of {num_objects} objects, got {len(objects)}."
            )
        return objects.nonzero().flatten()
    if len(objects) == 0:
        return objects.long()
    if objects.is_floating_point() or not -num_objects <= objects.min() <= objects.max() < (
        num_objects
    ):
        raise ValueError(
            f"redraw needs indices of {num_objects} examples, or True or False for each, got "
            f"{objects.tolist()}."
        )
    return objects % num_objects


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names) if names else "nothing"
