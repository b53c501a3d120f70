"""The weights of each neuron of a layer: output units, filters or embedding columns."""

from __future__ import annotations

from torch import Tensor

from zeromean.distributions.posteriors.posterior import Posterior


def by_neuron(per_weight: Tensor, posterior: Posterior) -> Tensor:
    """(*shape) -> (neurons, weights of each)."""
    layout = posterior.layout
    if layout.neuron_dim == 0:
        return per_weight.flatten(1)
    blocks = per_weight.unflatten(0, (layout.groups, -1)).transpose(1, 2)
    return blocks.flatten(2).flatten(0, 1)


def from_neurons(neurons: Tensor, posterior: Posterior) -> Tensor:
    """(neurons, weights of each), or (neurons, 1) for all of them alike -> (*shape)."""
    layout, shape = posterior.layout, posterior.shape
    neurons = neurons.expand(-1, posterior.numel() // len(neurons))
    if layout.neuron_dim == 0:
        return neurons.reshape(shape)
    blocks = neurons.unflatten(0, (layout.groups, -1)).unflatten(2, (-1, *shape[2:]))
    return blocks.transpose(1, 2).reshape(shape)
