"""Which layers of a network can become random, in the order of their calls, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from zeromean.conversion.twins import has_twin, is_norm
from zeromean.layers.blocks import monte_carlo_modes
from zeromean.layers.stochastic_module import StochasticModule
from zeromean.prediction.inputs import as_arguments, num_examples_in
from zeromean.training.post_hoc.tasks import AT_ONCE

# Drawing a normal number takes about as long as so many multiplications and additions.
NORMAL = 100
# And reading an entry of a matrix that is multiplied with one vector, as long as so many.
READ = 10
# With fewer samples an average is worse than one network of the means.
FEWEST_SAMPLES = 5


@dataclass(frozen=True)
class LayerCall:
    """A layer, and what one call of the model costs in it.

    Attributes:
        flops: Multiplications and additions of the layer.
        before: Those of the model until the layer is called.
        outputs: Numbers that it returns.
        weights: Numbers that its weights are.
        shares: Whether outputs of one example share weights: pixels, tokens, steps. Then weights
            are drawn, which is exact; else outputs are, which costs least.
    """

    name: str
    flops: int
    before: int
    outputs: int
    weights: int
    shares: bool


@dataclass(frozen=True)
class Calls:
    """The layers with a stochastic twin by the order of their last calls, and the model's FLOPs.

    Attributes:
        num_examples: Examples of the call that was counted.
    """

    layers: tuple[LayerCall, ...]
    total: int
    num_examples: int

    def cost(self, count: int, num_samples: int) -> float:
        """Passes that a prediction costs if the last so many layers are random.

        What comes before the first of them is computed once, and so are the moments of that one
        where it draws outputs.
        """
        random = self.layers[-count:]
        once = random[0].before
        again = self.total - once
        for place, layer in enumerate(random):
            if layer.shares:
                again += NORMAL * layer.weights * self.num_examples / AT_ONCE
            elif place == 0:
                once += 2 * layer.flops
                again += NORMAL * layer.outputs - layer.flops
            else:
                again += NORMAL * layer.outputs + layer.flops
        return (once + num_samples * again) / max(self.total, 1)

    def full_cost(self, num_samples: int) -> float:
        """The same if the weights of the last layer are drawn with a full covariance."""
        drawn = READ * self.layers[-1].weights ** 2 * self.num_examples / AT_ONCE
        return self.cost(1, num_samples) + num_samples * drawn / max(self.total, 1)

    def affordable(self, count: int, most: int, max_cost: float) -> int:
        """The most samples, up to so many, that a prediction with so many random layers can pay."""
        samples = range(most, min(most, FEWEST_SAMPLES) - 1, -1)
        return next((number for number in samples if self.cost(count, number) <= max_cost), 0)

    def last(self, count: int) -> dict[str, LayerCall]:
        return {call.name: call for call in self.layers[-count:]}


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
            tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
            found.pop(name, None)  # The last call counts: what follows it is drawn again.
            found[name] = LayerCall(
                name,
                flops=counter.get_total_flops() - start,
                before=start,
                outputs=sum(t.numel() for t in tensors),
                weights=sum(p.numel() for p in module.parameters()),
                shares=tensors[0].dim() > 2,
            )

        return hook

    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or isinstance(module, StochasticModule):
            continue
        if not has_twin(module) or is_norm(module):
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
    num_examples = num_examples_in(args, kwargs)
    return Calls(tuple(found.values()), counter.get_total_flops(), num_examples)
