"""What each function does to means and variances: a table that anybody may add to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeromean.arguments import shown

Rule = TypeVar("Rule", bound=Callable[..., Any])

_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_MODULES: dict[type[nn.Module], Callable[..., Any]] = {}


class NoRuleError(ValueError):
    """Moments cannot be taken through a function; samples can.

    Not a TypeError, which Python's operators take as a word that the other operand may know better.
    """


def register(*what: Any) -> Callable[[Rule], Rule]:
    """Say how means and variances go through functions or modules of your own, or of torch.

    Put it above the rule. A rule is called as the function is, with a
    `zeromean.moments.RandomTensor` for what is random, and returns one; that of a module gets the
    module first. `x.moments()` are the means and variances.

    Args:
        what: Functions (`torch.erf`, `torch.Tensor.erf`), or classes of modules, whose subclasses
            are meant too.
    """
    for one in what:
        is_module = isinstance(one, type) and issubclass(one, nn.Module)
        if not is_module and (isinstance(one, type) or not callable(one)):
            raise TypeError(
                "A rule is for functions or classes of modules, such as torch.erf or nn.Softsign, "
                f"got {shown(one)}."
            )

    def decorate(rule: Rule) -> Rule:
        for one in what:
            (_MODULES if isinstance(one, type) else _FUNCTIONS)[one] = rule
        return rule

    return decorate


def rule_of_module(module: nn.Module) -> Callable[..., Any] | None:
    """The rule of a module's class, or of the nearest of its base classes that has one."""
    for kind in type(module).__mro__:
        if kind in _MODULES:
            return _MODULES[kind]
    return None


def call_rule(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply the rule of a function that has met something random."""
    rule = _FUNCTIONS.get(function)
    if rule is not None:
        return rule(*args, **kwargs)
    if function in _ABOUT_SHAPES:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    if function in _READS_VALUES:
        raise NoRuleError(
            f"The model reads the value of a random activation ({_name(function)}), so that what "
            "it computes next depends on the noise; use method='samples'."
        )
    raise NoRuleError(
        f"There is no rule for the moments of {_name(function)}; use method='samples', or give it "
        "a rule of your own with zeromean.moments.register (docs, Moments)."
    )


def _name(function: Any) -> str:
    """A function as users write it: torch.erf, Tensor.erf_, F.softsign."""
    name = getattr(function, "__name__", None) or repr(function)
    if getattr(Tensor, name, None) is function or isinstance(
        function, (type(Tensor.add), type(Tensor.__add__))
    ):
        return f"Tensor.{name}"
    if getattr(torch, name, None) is function:
        return f"torch.{name}"
    if getattr(nn.functional, name, None) is function:
        return f"F.{name}"
    return name


_ABOUT_SHAPES = {
    *(
        getattr(Tensor, name).__get__  # pyright: ignore[reportAttributeAccessIssue]
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
    ),
    *(
        getattr(Tensor, name).__get__  # pyright: ignore[reportAttributeAccessIssue]
        for name in ("is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps")
    ),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.element_size),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
    *(Tensor.__hash__, Tensor.is_contiguous, Tensor.stride),
}
_READS_VALUES = {
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.item),
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__contains__, Tensor.__iter__),
    *(torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, torch.is_nonzero),
    *(Tensor.gt, Tensor.lt, Tensor.ge, Tensor.le, Tensor.eq, Tensor.ne),
    *(Tensor.__gt__, Tensor.__lt__, Tensor.__ge__, Tensor.__le__, Tensor.__eq__, Tensor.__ne__),
    *(torch.gt, torch.lt, torch.ge, torch.le, torch.eq, torch.ne, torch.argmax, Tensor.argmax),
}
