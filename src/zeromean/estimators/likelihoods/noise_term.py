"""The terms of a regression's objective in which its noise precision β = τ² stands alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Changes of the objective below it, relative to its largest term, are rounding errors.
ROUNDING = 1e-14


@dataclass(frozen=True)
class NoiseTerm:
    """-count log τ + ½ τ² square, minimised over τ too where it is not fixed."""

    count: float
    square: float
    fixed: bool

    def value(self, tau: float) -> float:
        return 0.5 * tau**2 * self.square - self.count * float(np.log(tau))

    def rounding(self, objective: float, precision: float) -> float:
        """Rounding error of the objective, whose large terms cancel where there is little noise."""
        return ROUNDING * (1 + abs(objective) + precision * self.square)

    def best_tau(self, projection: float) -> float:
        """The optimum for given weights, `projection` being bᵀ v."""
        root = np.sqrt(projection**2 + 4 * self.count * self.square)
        return float((projection + root) / (2 * self.square))


# For a likelihood without a noise precision.
NO_NOISE = NoiseTerm(count=0.0, square=0.0, fixed=True)
