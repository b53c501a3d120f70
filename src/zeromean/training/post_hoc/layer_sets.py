"""Which layers of a network can become random, in the order of their calls, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from zeromean.conversion.twins import has_twin
from zeromean.layers.blocks import monte_carlo_modes
from zeromean.layers.stochastic_module import StochasticModule
from zeromean.prediction.inputs import as_arguments

# Drawing a normal number takes about as long as so many multiplications and additions.
NORMAL = 100


@dataclass(frozen=True)
class LayerCall:
    """A layer, and what one call of the model costs in it.

    Attributes:
        flops: Multiplications and additions of the layer.
        before: Those of the model until the layer is called.
        outputs: Numbers that it returns.
    """

    name: str
    flops: int
    before: int
    outputs: int


@dataclass(frozen=True)
class Calls:
    """The layers with a stochastic twin by the order of their last calls, and the model's FLOPs."""

    layers: tuple[LayerCall, ...]
    total: int

    def cost(self, count: int, num_samples: int) -> float:
        """Passes that a prediction costs if the last so many layers draw their outputs.

        What comes before the first random layer, and the moments of that one, are computed once.
        """
        random = self.layers[-count:]
        first, *later = random
        once = first.before + 2 * first.flops
        drawn = sum(layer.flops for layer in later) + NORMAL * sum(c.outputs for c in random)
        again = self.total - first.before - first.flops + drawn
        return (once + num_samples * again) / max(self.total, 1)

    def last(self, count: int) -> tuple[str, ...]:
        return tuple(call.name for call in self.layers[-count:])


@torch.no_grad()
def calls_of(model: nn.Module, inputs: Any) -> Calls:
    """Call the model once and count."""
    found: dict[str, LayerCall] = {}
    began: dict[str, int] = {}
    handles = []
    counter = FlopCounterMode(display=False)

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            began[name] = counter.get_total_flops()

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            start = began[name]
            outputs = sum(t.numel() for t in tree_leaves(output) if isinstance(t, Tensor))
            found.pop(name, None)  # The last call counts: what follows it is drawn again.
            found[name] = LayerCall(name, counter.get_total_flops() - start, start, outputs)

        return hook

    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or isinstance(module, StochasticModule) or not has_twin(module):
            continue
        inside.update(module.modules())
        handles.append(module.register_forward_pre_hook(before(name)))
        handles.append(module.register_forward_hook(after(name)))
    args, kwargs = as_arguments(inputs)
    try:
        # In these modes no fused path of torch's transformers goes round the hooks.
        with monte_carlo_modes(model), counter:
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return Calls(tuple(found.values()), counter.get_total_flops())
