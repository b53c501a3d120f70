"""What a feature must add to the evidence to be in the model: its log prior odds, in nats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from zeromean.estimators.array_types import Array


class Prices(Protocol):
    """The price of one feature more in a model of `size`, and the sum of those before it."""

    def of_one_more(self, size: int) -> float: ...

    def total(self, size: int) -> float: ...


def prices_of(threshold: float | str, num_features: int) -> Prices:
    """As the estimators' parameter `threshold` says."""
    return LearnedPrice(num_features) if threshold == "auto" else FixedPrice(float(threshold))


@dataclass(frozen=True)
class FixedPrice:
    """The same for every feature."""

    nats: float

    def of_one_more(self, size: int) -> float:
        return self.nats

    def total(self, size: int) -> float:
        return self.nats * size


FREE = FixedPrice(0.0)


def lower_price(prices: Prices, divisor: float) -> FixedPrice:
    """A part of what the first feature costs, for every feature."""
    return FixedPrice(prices.of_one_more(0) / divisor)


def nearly_free(prices: Prices) -> FixedPrice:
    """So little that features enter which are relevant only together, but not everything does."""
    return lower_price(prices, 32)


@dataclass(frozen=True)
class LearnedPrice:
    """A uniform prior over the number of relevant features, and over the sets of that number.

    The odds of one feature more are then (size + 1) to (num_features - size): the more features
    turn out to be relevant, the easier it becomes for the next one, and chance passes as rarely
    among a thousand features as among ten (Scott & Berger, 2010). Never below zero.
    """

    num_features: int

    def of_one_more(self, size: int) -> float:
        return float(self._prices[size]) if size < self.num_features else 0.0

    def total(self, size: int) -> float:
        return float(self._totals[size])

    @cached_property
    def _prices(self) -> Array:
        sizes = np.arange(self.num_features)
        return np.log(np.maximum((self.num_features - sizes) / (sizes + 1), 1.0))

    @cached_property
    def _totals(self) -> Array:
        return np.append(0.0, np.cumsum(self._prices))
