"""What everything that draws noise has in common: a sampler and, where there is a prior, a KL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zeromean import functional
from zeromean.arguments import require_model
from zeromean.samplers.sampler import Sampler

# The own samplers of layers that are in a `swapped_samplers` block.
_own_samplers: WeakKeyDictionary[Any, Sampler] = WeakKeyDictionary()


class StochasticModule(nn.Module):
    """A module that draws noise: a layer with random weights, or noise on units.

    Attributes:
        sampler: How it draws; `zm.sampling` changes it for the length of a block.
    """

    sampler: Sampler

    def accepted_sampler(self, sampler: Sampler) -> Sampler:
        """The way to draw when all of a model is asked to draw with this sampler."""
        raise NotImplementedError

    def distributions(self) -> dict[str, nn.Module]:
        """What is random here, by name: the posteriors of weights, or the noise on units."""
        raise NotImplementedError

    def kl_terms(self) -> dict[nn.Module, Callable[[], Tensor]]:
        """How to compute the KL of each distribution here, by the module that holds it.

        Modules may share a distribution, whose KL counts once in a model. Empty without a prior.
        """
        raise NotImplementedError

    def kl(self) -> Tensor:
        """KL(q ‖ p), summed over what is random here; zero without a prior."""
        terms = [term() for term in self.kl_terms().values()]
        return torch.stack(terms).sum() if terms else no_kl(self)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickle: a copy is in no `sampling` block, and draws by its own sampler."""
        return {**self.__dict__, "sampler": own_sampler(self)}


def stochastic_modules(model: nn.Module) -> dict[str, StochasticModule]:
    """All that draws noise, by name: stochastic and recurrent layers, and noise on units."""
    require_model(model)
    return {n: m for n, m in model.named_modules() if isinstance(m, StochasticModule)}


def no_kl(module: nn.Module) -> Tensor:
    """The KL of what has no prior, of the type and on the device of any other."""
    return functional.wide(next(module.parameters(), torch.zeros(())).new_zeros(()))


def own_sampler(layer: Any) -> Sampler:
    """How a layer draws when no block says otherwise."""
    return _own_samplers[layer] if layer in _own_samplers else layer.sampler


@contextmanager
def swapped_samplers(samplers: Mapping[Any, Sampler]) -> Iterator[None]:
    """Let each of these stochastic modules draw with another sampler inside the block."""
    previous = {layer: layer.sampler for layer in samplers}
    outermost = {layer: own for layer, own in previous.items() if layer not in _own_samplers}
    try:
        _own_samplers.update(outermost)
        for layer, sampler in samplers.items():
            layer.sampler = sampler
        yield
    finally:
        for layer in outermost:
            _own_samplers.pop(layer, None)
        for layer, sampler in previous.items():
            layer.sampler = sampler
