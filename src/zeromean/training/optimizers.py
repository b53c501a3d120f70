"""SGD for what has a scale, Adam for what has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Groups of `zm.parameter_groups` whose gradients say little about the size of a good step.
_BY_ADAM = ("log_alpha", "scales")


class NesterovAndAdam(torch.optim.Optimizer):
    """Nesterov momentum for weights; Adam for log α, log-variances and scales of variance layers.

    The gradient of log α falls off exponentially as it rises, so that steps in proportion to it
    would never get there.

    Args:
        groups: As `zm.parameter_groups` makes them.
        momentum: Of SGD.
        eps: Of Adam.
        fused: Whether torch's fused steps are taken.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, momentum: float, eps: float, fused: bool = True
    ):
        by_adam = [group for group in groups if group["name"] in _BY_ADAM]
        by_sgd = [group for group in groups if group["name"] not in _BY_ADAM]
        self.parts: list[torch.optim.Optimizer] = []
        if by_sgd:
            nesterov = momentum > 0
            sgd = torch.optim.SGD(by_sgd, momentum=momentum, nesterov=nesterov, fused=fused)
            self.parts.append(sgd)
        if by_adam:
            self.parts.append(torch.optim.Adam(by_adam, eps=eps, fused=fused))
        super().__init__([p for group in groups for p in group["params"]], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # The same dicts, so that a scheduler that sets rates here sets them there.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def load_state_(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Go on from a state; how steps are computed, which a device decides, stays as it is."""
    fused = [group["fused"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, value in zip(optimizer.param_groups, fused, strict=True):
        group["fused"] = value
