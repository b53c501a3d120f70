"""Checks of arguments, before anything is done with them.

Each function takes arguments by name. It raises TypeError for a value of the wrong kind, and
ValueError for a value out of range. Functions that return something return the form that the
library computes with: for example a Python integer for one of numpy's.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What weights and activations can be: float8 has no arithmetic, and noise is real.
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# What torch's generators take.
_SEEDS = (-(2**63), 2**64 - 1)


def require_integer(name: str, value: Any, *, at_least: int | None = None) -> int:
    """A whole number, numpy's too, and not a bool or a float."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {shown(value)}.")
    if at_least is not None and value < at_least:
        bound = "not be negative" if at_least == 0 else f"be at least {at_least}"
        raise ValueError(f"{name} must {bound}, got {value}.")
    return int(value)


# Kernels of convolutions count in 32 bits, in which larger numbers become others.
_FIRST_TOO_LARGE = 2**31


def require_sizes(name: str, value: Any, count: int, *, at_least: int) -> tuple[int, ...]:
    """One size for each of so many dimensions, from one for all or one for each."""
    given = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if len(given) not in (1, count):
        raise ValueError(f"{name} must be one number or {count}, got {shown(value)}.")
    sizes = tuple(require_integer(name, size, at_least=at_least) for size in given)
    if max(sizes) >= _FIRST_TOO_LARGE:
        raise ValueError(f"{name} must be smaller than 2³¹, got {shown(value)}.")
    return sizes * (count // len(sizes))


def require_numbers(**values: Any) -> None:
    """Refuse what is not a real number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {shown(value)}.")


def require_flag(name: str, value: Any) -> bool:
    """True or False; 1, 0 and None are taken as torch takes them."""
    if value is not None and not (isinstance(value, (Integral, np.bool_)) and value in (0, 1)):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.")
    return bool(value)


def require_seed(value: Any) -> int:
    """An integer that torch's generators take."""
    seed = require_integer("seed", value)
    if not _SEEDS[0] <= seed <= _SEEDS[1]:
        raise ValueError(f"seed must lie between −2⁶³ and 2⁶⁴ − 1, got {seed}.")
    return seed


def require_dtype(dtype: Any) -> None:
    """Refuse types that weights cannot have; None is torch's default."""
    if dtype is not None and dtype not in FLOATING:
        names = ", ".join(map(str, FLOATING))
        raise TypeError(f"dtype must be one of {names}, got {shown(dtype)}.")


def require_floating(owner: str, x: Any) -> None:
    """Refuse inputs that are not floating-point tensors."""
    if not isinstance(x, Tensor):
        hint = "; use torch.as_tensor(x, dtype=torch.float32)" if isinstance(x, np.ndarray) else ""
        raise TypeError(f"{owner} needs a tensor, got {shown(x)}{hint}.")
    if x.dtype not in FLOATING:
        hint = "take its real part or its magnitude" if x.is_complex() else "use x.float()"
        raise TypeError(f"{owner} needs floating-point inputs, got {x.dtype}; {hint}.")


def require_same_dtype(owner: str, x: Tensor, dtype: torch.dtype) -> None:
    """Refuse inputs of another type than the weights, but under autocast, which converts both."""
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{owner} has weights of {dtype}, got an input of {x.dtype}; use x.to({dtype}), or "
            f"model.to({x.dtype})."
        )


def require_model(model: Any, name: str = "model") -> None:
    """Refuse what is not a module: its class, its weights, a path."""
    if isinstance(model, nn.Module):
        return
    hint = ""
    if isinstance(model, type) and issubclass(model, nn.Module):
        hint = f"; build one: {model.__name__}(…)"
    elif isinstance(model, dict):
        hint = "; build the model and call its load_state_dict"
    raise TypeError(f"{name} must be a torch module, got {shown(model)}{hint}.")


def require_function(name: str, value: Any, example: str) -> None:
    """Refuse what cannot be called, and classes and modules, which mean something else."""
    if isinstance(value, (type, nn.Module)) or not callable(value):
        raise TypeError(f"{name} must be a function, got {shown(value)}; use {example}.")


def require_predicate(where: Callable[[str, nn.Module], bool] | None) -> None:
    """Refuse a `where` that is not a function of name and module."""
    if where is not None:
        example = "lambda name, module: name == 'head'"
        if isinstance(where, str) and where.isprintable():
            example = f"lambda name, module: name == {where!r}"
        require_function("where", where, example)


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse what is not one of these words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}.")


def nearest(value: Any, names: Sequence[str]) -> str:
    """The name that a word was meant to be: all of them where none is near."""
    if isinstance(value, str):
        by_lower_case = {name.lower(): name for name in names}
        close = difflib.get_close_matches(value.lower(), by_lower_case, n=1)
        if close:
            return f"zm.{by_lower_case[close[0]]}"
    *others, last = (f"zm.{name}" for name in names)
    return f"{', '.join(others)} or {last}"


def shown(value: Any) -> str:
    """A value in a message: short, also where it is a tensor or a whole model."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}".replace("torch.", "")
    if isinstance(value, np.ndarray):
        return f"a numpy array of shape {value.shape}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__} module"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
