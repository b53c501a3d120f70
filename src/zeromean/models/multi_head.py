"""One network for several tasks, each with outputs of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from zeromean.arguments import require_integer, require_model


class MultiHead(nn.Module):
    """A body that tasks share, and a head for each of them; `task` says whose head answers.

    Add a head when its task comes: a random head that waits would be drawn to its prior meanwhile.

    Args:
        body: From an input to features.
        heads: From the features to the outputs of a task, one a task so far.

    Attributes:
        task: The task whose head `forward` uses, counted from 0.
    """

    def __init__(self, body: nn.Module, heads: Iterable[nn.Module] = ()):
        super().__init__()
        require_model(body, "body")
        self.body = body
        self.heads = nn.ModuleList()
        for head in heads:
            self.add_head(head)
        self.task = 0

    def add_head(self, head: nn.Module) -> int:
        """Add the head of one more task, choose it, and return the number of the task."""
        require_model(head, "head")
        self.heads.append(head)
        self.task = len(self.heads) - 1
        return self.task

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "task":
            value = require_integer("task", value, at_least=0)
            if value >= max(len(self.heads), 1):
                raise ValueError(
                    f"task must be one of the {len(self.heads)} that have a head, counted from 0, "
                    f"got {value}; call add_head first."
                )
        super().__setattr__(name, value)

    def forward(self, input: Tensor) -> Tensor:
        if not self.heads:
            raise ValueError("MultiHead has no head yet; call add_head.")
        return self.heads[self.task](self.body(input))

    def extra_repr(self) -> str:
        return f"task={self.task}"
