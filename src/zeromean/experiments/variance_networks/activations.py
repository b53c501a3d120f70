"""What a variance layer does with an input: the standard deviations of its outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean.distributions.posteriors.factorized import independent


@torch.no_grad()
def log_std(model: nn.Module, name: str, inputs: Tensor, batch_size: int = 1000) -> Tensor:
    """Logarithm of the standard deviation of a layer's outputs, for every input."""
    seen: list[Tensor] = []
    layer = model.get_submodule(name)
    if not isinstance(layer, zm.StochasticLayer):
        raise TypeError(f"{name} is not a stochastic layer.")
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    was_training = model.training
    try:
        model.eval()
        for batch in inputs.split(batch_size):
            model(batch)
    finally:
        handle.remove()
        model.train(was_training)
    weight = independent(layer.weight, "log σ of outputs")
    variances = [layer.linear_map().moments(x, weight)[1] for x in seen]
    variance = torch.cat(variances)
    return 0.5 * variance.clamp_min(torch.finfo(variance.dtype).tiny).log()
