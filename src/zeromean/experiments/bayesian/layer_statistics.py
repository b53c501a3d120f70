"""What dense layers see and what their outputs are worth: the two factors of a Fisher matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 1000


def statistics(model: nn.Module, inputs: Tensor) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """For each batch and dense layer its inputs `a` and the gradients `g` at its outputs.

    Gradients are those of the log-likelihood of labels drawn from the model itself, so that the
    products are those of the Fisher matrix: E[g gᵀ ⊗ a aᵀ], in the mean over examples.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    names: dict[nn.Module, str] = {module: name for name, module in layers.items()}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen[names[module]] = (args[0], output)

    handles = [module.register_forward_hook(note) for module in layers.values()]
    try:
        for batch in inputs.split(BATCH):
            seen.clear()
            scores = model(batch)
            drawn = torch.multinomial(scores.detach().softmax(-1), 1).squeeze(1)
            nll = F.cross_entropy(scores, drawn, reduction="sum")
            gradients = torch.autograd.grad(nll, [output for _, output in seen.values()])
            yield {
                name: (a.detach(), g)
                for (name, (a, _)), g in zip(seen.items(), gradients, strict=True)
            }
    finally:
        for handle in handles:
            handle.remove()
