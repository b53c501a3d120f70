"""A tensor whose elements are random, known by their means and variances.

It stands for an activation while a model runs. torch hands every function that meets one to the
rule of that function (`rules.py`), so that the model's own code decides what is computed, loops and
conditions on shapes included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from zeromean.moments.rules import call_rule

Moments = tuple[Tensor, Tensor]


class Covariance(Protocol):
    """Σ along the last dimension, `(*, features, features)`, or A Σ Aᵀ for rows A.

    The rows are taken through the network backwards, which costs as much as there are of them: a
    covariance of few outputs never needs one of many hidden units.
    """

    def __call__(self, rows: Tensor | None = None, /) -> Tensor: ...


class Diagonal(Covariance):
    """Of independent features, which element-wise functions leave independent."""

    def __init__(self, variance: Tensor):
        self.variance = variance

    def __call__(self, rows: Tensor | None = None, /) -> Tensor:
        if rows is None:
            return torch.diag_embed(self.variance)
        return (rows * self.variance.unsqueeze(-2)) @ rows.mT


def known(matrix: Tensor) -> Covariance:
    """One that has been computed."""

    def covariance(rows: Tensor | None = None, /) -> Tensor:
        return matrix if rows is None else rows @ matrix @ rows.mT

    return covariance


FULL_UP_TO = 128
"""Features, at most, whose covariance is computed where nobody asks for it."""


class RandomTensor(Tensor):
    """Means and variances of the elements of an activation, taken as independent.

    What is known beyond that is kept as long as it is cheap: the covariance along the last
    dimension, as a recipe, and the increasing function that it came out of, which pooling may
    change places with. Both are computed when somebody asks for them.

    Attributes:
        mean: Means of the elements.
        variance: Their variances, in the same shape.
        covariance: Computes covariances along the last dimension.
    """

    _like: Tensor
    _moments: Moments | None
    _compute: Callable[[], Moments] | None
    covariance_of: Covariance | None
    increasing: tuple[Callable[[RandomTensor], RandomTensor], RandomTensor] | None

    @staticmethod
    def __new__(
        cls,
        mean: Tensor,
        variance: Tensor,
        covariance: Covariance | None = None,
    ) -> RandomTensor:
        if mean.shape != variance.shape:
            mean, variance = torch.broadcast_tensors(mean, variance)
        self = _wrapper(cls, mean)
        self._moments = (mean, variance)
        self.covariance_of = covariance
        return self

    @staticmethod
    def increasing_of(
        function: Callable[[RandomTensor], RandomTensor], x: RandomTensor
    ) -> RandomTensor:
        """function(x), element by element, of an increasing function; computed when it is read."""
        self = _wrapper(RandomTensor, x)
        self._compute = lambda: function(x).moments()
        self.increasing = (function, x)
        return self

    def moments(self) -> Moments:
        """Means and variances."""
        if self._moments is None:
            assert self._compute is not None
            self._moments = self._compute()
            self._compute = None
        return self._moments

    def copied(self) -> RandomTensor:
        """The same, whatever this one becomes."""
        return _wrapper(RandomTensor, self).become_(self)

    def become_(self, other: RandomTensor) -> RandomTensor:
        """Be another one from now on, as after an operation in place."""
        self._moments, self._compute = other._moments, other._compute
        self.covariance_of, self.increasing = other.covariance_of, other.increasing
        return self

    # What layers ask of every input, without a detour through torch: a batch of one would feel it.

    shape = property(lambda self: self._like.shape)  # pyright: ignore
    dtype = property(lambda self: self._like.dtype)  # pyright: ignore
    device = property(lambda self: self._like.device)  # pyright: ignore
    ndim = property(lambda self: self._like.dim())  # pyright: ignore

    def dim(self) -> int:
        return self._like.dim()

    def size(self, dim: int | None = None) -> Any:
        return self._like.shape if dim is None else self._like.shape[dim]

    def __len__(self) -> int:
        return len(self._like)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch._C.DisableTorchFunction():
            return f"RandomTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_rule(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What goes past torch's functions and their rules: there are no numbers here to compute on.
        return call_rule(func, args, kwargs or {})


def _wrapper(kind: Any, like: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            kind, like.shape, dtype=like.dtype, device=like.device
        )
    # A plain tensor of its shape and type.
    self._like = like._like if isinstance(like, RandomTensor) else like
    self._moments = self._compute = self.covariance_of = self.increasing = None
    return self
