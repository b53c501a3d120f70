"""What a network is to become when it is shrunk, and which one of several comes nearest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from zeromean.arguments import require_choice, require_integer, require_numbers

Runtime = Literal["torch", "onnxruntime"]

# Points (or nats) beyond which a network is not what anybody asked for, however small it is.
MOST_LOST = 10.0


class TargetMissedWarning(UserWarning):
    """No network was found that is what was asked for."""


class Candidate(Protocol):
    """What is measured of a network."""

    @property
    def score(self) -> float: ...
    @property
    def file_size(self) -> int: ...
    @property
    def milliseconds(self) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is asked for; without anything, a network as small as it gets at no loss.

    Among the networks that have the speed-up and the file size that are asked for, the most
    accurate one is taken. Where only `loss` counts, the fastest one.
    """

    loss: float | None = None
    """Accuracy that may be lost on the validation data, in percentage points (with a likelihood: by
    how much the validation NLL may rise). Default: nothing that the validation data could show, one
    standard error of the accuracy; where a speed-up or a file size is asked for, 10 points."""
    speedup: float | None = None
    """How many times faster it is to be."""
    file_size: int | None = None
    """Bytes of its file."""
    runtime: Runtime | None = None
    """Where it is to be fast. Default: onnxruntime where that is installed, else torch."""
    batch_size: Literal[1, 64] = 64
    """Examples in a batch, for which it is to be fast."""

    def __post_init__(self) -> None:
        given = {"loss": self.loss, "speedup": self.speedup}
        given = {name: value for name, value in given.items() if value is not None}
        require_numbers(**given)
        for name, value in given.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {value}.")
        if self.file_size is not None:
            require_integer("file_size", self.file_size, at_least=1)
        if self.runtime is not None:
            require_choice("runtime", self.runtime, ("torch", "onnxruntime"))
        if self.batch_size not in (1, 64):
            raise ValueError(f"batch_size must be 1 or 64, got {self.batch_size}.")

    def allowed_loss(self, standard_error: float) -> float:
        """How much of the score may be lost."""
        if self.loss is not None:
            return self.loss
        return MOST_LOST if self.is_of_size else standard_error

    @property
    def is_of_size(self) -> bool:
        """Whether a speed-up or a file size is asked for, at which a search may end."""
        return self.speedup is not None or self.file_size is not None

    def is_met(self, before: Candidate, found: Candidate, key: str, allowed: float) -> bool:
        """Whether a network is what was asked for.

        Args:
            key: Which of the measured times counts.
            allowed: What `allowed_loss` said.
        """
        fast = self.speedup is None or speedup(before, found, key) >= self.speedup
        small = self.file_size is None or found.file_size <= self.file_size
        return fast and small and before.score - found.score <= allowed

    def choose(
        self, before: Candidate, found: Sequence[Candidate], key: str, allowed: float
    ) -> int:
        """The number of the network to take; where none is what was asked for, the nearest one."""
        met = [i for i, c in enumerate(found) if self.is_met(before, c, key, allowed)]
        met = [i for i in met if found[i] is not before] or met
        if met and not self.is_of_size:
            return min(met, key=lambda i: (found[i].milliseconds[key], found[i].file_size))
        if met:
            return max(met, key=lambda i: (found[i].score, -found[i].file_size))
        return min(range(len(found)), key=lambda i: self._miss(before, found[i], key, allowed))

    def _miss(self, before: Candidate, found: Candidate, key: str, allowed: float) -> float:
        """How far a network is from what was asked for."""
        if before.score - found.score > allowed:
            return 100.0 + before.score - found.score
        miss = 0.0
        if self.speedup is not None:
            miss += max(0.0, math.log(max(self.speedup, 1e-9) / speedup(before, found, key)))
        if self.file_size is not None:
            miss += max(0.0, math.log(found.file_size / self.file_size))
        return miss


def speedup(before: Candidate, found: Candidate, key: str) -> float:
    """How many times faster a network is."""
    return before.milliseconds[key] / max(found.milliseconds[key], 1e-9)
