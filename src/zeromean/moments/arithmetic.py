"""Sums, differences, products, averages."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeromean.moments.random_tensor import Diagonal, RandomTensor
from zeromean.moments.rules import NoRuleError, register


@register(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, operator.add)
def plus(x: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """x + alpha · other, two random ones being independent."""
    if not isinstance(x, RandomTensor):
        return _shifted(other, x, alpha)
    if not isinstance(other, RandomTensor):
        return _shifted(x, other if alpha == 1 else other * alpha, 1)
    (mean, variance), (other_mean, other_variance) = x.moments(), other.moments()
    if x is other:
        return _scaled(x, 1 + alpha)
    own, others = x.covariance_of, other.covariance_of

    def together(rows: Tensor | None = None, /) -> Tensor:
        assert own is not None
        assert others is not None
        return own(rows) + alpha**2 * others(rows)

    both = own is not None and others is not None and x.shape == other.shape
    covariance = together if both else None
    return RandomTensor(mean + alpha * other_mean, variance + alpha**2 * other_variance, covariance)


@register(torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract)
def minus(x: Any, other: Any, *, alpha: float = 1) -> Tensor:
    return plus(x, other, alpha=-alpha)


@register(Tensor.__rsub__, torch.rsub)
def _reverse_minus(x: Any, other: Any) -> Tensor:
    return plus(other, x, alpha=-1)


@register(torch.neg, Tensor.neg, Tensor.__neg__, torch.negative)
def _negative(x: RandomTensor) -> Tensor:
    return _scaled(x, -1)


@register(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply)
def times(x: Any, other: Any) -> Tensor:
    """x · other, two random ones being independent."""
    if not isinstance(x, RandomTensor):
        return _scaled(other, x)
    if not isinstance(other, RandomTensor):
        return _scaled(x, other)
    (mean, variance), (other_mean, other_variance) = x.moments(), other.moments()
    if x is other:
        return _squared(x)
    spread = variance * (other_mean.square() + other_variance) + mean.square() * other_variance
    return RandomTensor(mean * other_mean, spread)


@register(Tensor.__rtruediv__, Tensor.__rdiv__, torch.reciprocal, Tensor.reciprocal)
def _quotient(*_: Any, **__: Any) -> Tensor:
    raise NoRuleError(
        "Dividing by a random activation gives no finite variance, for it may come near zero; use "
        "method='samples'."
    )


@register(torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide)
def _divided(x: Any, other: Any) -> Tensor:
    if isinstance(other, RandomTensor):
        return _quotient()
    return _scaled(x, 1 / other)


@register(torch.square, Tensor.square)
def _squared(x: RandomTensor) -> Tensor:
    """Of a normal: E x² = m² + v, Var x² = 2v² + 4m²v."""
    mean, variance = x.moments()
    square = mean.square()
    return RandomTensor(square + variance, variance * (2 * variance + 4 * square))


@register(torch.exp, Tensor.exp)
def _exponential(x: RandomTensor) -> Tensor:
    """Of a normal: a log-normal."""
    mean, variance = x.moments()
    average = (mean + variance / 2).exp()
    return RandomTensor(average, average.square() * variance.expm1())


@register(torch.pow, Tensor.pow, Tensor.__pow__)
def _power(x: Any, exponent: Any) -> Tensor:
    if exponent == 2:
        return _squared(x)
    raise NoRuleError(
        f"Moments have a rule for squares and for no other power, got an exponent of {exponent}; "
        "use method='samples'."
    )


@register(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, Tensor.bmm)
def product(x: Any, other: Any) -> Tensor:
    """A product of matrices whose elements are independent."""
    mean, variance = _moments_of(x)
    other_mean, other_variance = _moments_of(other)
    spread: Tensor | None = None
    if variance is not None:
        spread = variance @ other_mean.square()
    if other_variance is not None:
        left = mean.square() if variance is None else mean.square() + variance
        through = left @ other_variance
        spread = through if spread is None else spread + through
    assert spread is not None
    return RandomTensor(mean @ other_mean, spread)


@register(torch.mean, Tensor.mean)
def _mean(x: RandomTensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
    mean, variance = x.moments()
    average = mean.mean(dim, keepdim, **options)
    number = max(mean.numel() // max(average.numel(), 1), 1)
    return RandomTensor(average, variance.mean(dim, keepdim, **options) / number)


@register(torch.sum, Tensor.sum)
def _sum(x: RandomTensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
    mean, variance = x.moments()
    return RandomTensor(mean.sum(dim, keepdim, **options), variance.sum(dim, keepdim, **options))


def _shifted(x: RandomTensor, by: Any, factor: float) -> Tensor:
    """by + factor · x."""
    x = x if factor == 1 else _scaled(x, factor)
    mean, variance = x.moments()
    shifted = mean + by
    same = shifted.shape == variance.shape
    return RandomTensor(shifted, variance, x.covariance_of if same else None)


def _scaled(x: RandomTensor, by: Any) -> RandomTensor:
    mean, variance = x.moments()
    scaled = mean * by
    before = x.covariance_of

    def covariance(rows: Tensor | None = None, /) -> Tensor:
        assert before is not None
        if not isinstance(by, Tensor) or by.dim() == 0:
            return before(rows) * by**2
        factors = by.expand_as(mean).unsqueeze(-2)
        return before() * factors * factors.mT if rows is None else before(rows * factors)

    spread = variance * by**2
    if before is None or scaled.shape != mean.shape:
        return RandomTensor(scaled, spread)
    independent = isinstance(before, Diagonal)
    return RandomTensor(scaled, spread, Diagonal(spread) if independent else covariance)


def _moments_of(x: Any) -> tuple[Tensor, Tensor | None]:
    return x.moments() if isinstance(x, RandomTensor) else (x, None)


def in_place(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule of a function that writes its result into its first argument."""

    def apply(x: Any, *args: Any, **kwargs: Any) -> Tensor:
        result = rule(x, *args, **kwargs)
        if isinstance(x, RandomTensor) and isinstance(result, RandomTensor):
            return x.become_(result)
        return result

    return apply


register(Tensor.add_, Tensor.__iadd__)(in_place(plus))
register(Tensor.sub_, Tensor.__isub__)(in_place(minus))
register(Tensor.mul_, Tensor.__imul__)(in_place(times))
register(Tensor.div_, Tensor.__itruediv__)(in_place(_divided))
