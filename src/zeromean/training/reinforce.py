"""Gradients of drop rates through what was drawn with them: REINFORCE, with a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.arguments import require_model, shown
from zeromean.layers.dropout.binary import BinaryDropout


def reinforce_term(
    model: nn.Module, noise: Mapping[str, Tensor], losses: Tensor, *, baseline: bool = True
) -> Tensor:
    """A term of value zero, whose gradient is that of `learn="reinforce"` drop rates.

    Added to the mean of the losses, it makes their gradient unbiased: E(loss − baseline) ∇ log q of
    the units that were dropped. The baseline of an example is the mean loss of the others in the
    batch, which depends on nothing that was drawn for it; it changes the variance alone. Williams
    (1992).

    Args:
        noise: What the losses were computed with: `noise = zm.draw_noise(model, len(x))`, held by
            `zm.held_noise(model, noise, num_objects=len(x))`.
        losses: The loss of every example, `(examples,)`.
        baseline: Whether to subtract it; False shows what it is good for.
    """
    require_model(model)
    drawn = _drawn_units(model, noise)
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        raise ValueError(
            f"losses must be one number for each example, got {shown(losses)}; use "
            "reduction='none'."
        )
    log_prob = torch.stack([module.log_prob(noise[name]) for name, module in drawn.items()]).sum(0)
    if log_prob.shape != losses.shape:
        raise ValueError(
            f"There is noise for {len(log_prob)} examples and a loss of {len(losses)}; draw it "
            "with zm.draw_noise(model, len(x))."
        )
    advantage = losses.detach()
    if baseline and len(losses) > 1:
        others = (advantage.sum() - advantage) / (len(losses) - 1)
        advantage = advantage - others
    term = (advantage * log_prob).mean()
    return term - term.detach()


def _drawn_units(model: nn.Module, noise: Any) -> dict[str, BinaryDropout]:
    named = model.named_modules()
    drawn = {
        f"{name}.units".lstrip("."): module
        for name, module in named
        if isinstance(module, BinaryDropout) and module.learn == "reinforce"
    }
    if not drawn:
        raise ValueError(
            "The model has no drop rate to learn like this; build one by "
            "zm.BinaryDropout(…, learn='reinforce')."
        )
    missing = [name for name in drawn if not isinstance(noise, Mapping) or name not in noise]
    if missing:
        raise ValueError(
            f"noise has nothing for {', '.join(missing)}; draw it with zm.draw_noise(model, "
            "len(x))."
        )
    return drawn
