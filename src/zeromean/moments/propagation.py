"""Running a model on means and variances: one pass, in which nothing is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeromean.functional.numerics import can_branch
from zeromean.layers.stochastic_module import stochastic_modules, swapped_samplers
from zeromean.moments.noise import dropped_out
from zeromean.moments.random_tensor import FULL_UP_TO, RandomTensor, known
from zeromean.moments.rules import NoRuleError, rule_of_module
from zeromean.moments.weights import Propagated

_DROPOUTS = {
    *(F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
}
_DRAWS = {
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli),
    *(torch.rand_like, torch.randn_like, torch.randint_like, torch.multinomial, torch.poisson),
    *(Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.random_, Tensor.exponential_),
    *(Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_, Tensor.bernoulli, Tensor.multinomial),
    *(F.alpha_dropout, F.feature_alpha_dropout, F.gumbel_softmax),
}


@contextmanager
def propagating(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the block the model computes means and variances, where it would draw noise.

    What no noise has reached stays a plain tensor, and costs what it does in a plain pass.
    """
    with without_draws(model), _InsteadOfDraws():
        yield model


def propagated(model: nn.Module, call: Callable[[], Tensor]) -> Tensor:
    """What `call()`, which calls the model, returns inside `propagating`, at less cost.

    To watch every function costs time at each of them. The generator's state tells as well whether
    anything was drawn; then it is put back, and the call watched.
    """
    if not can_branch() or torch.cuda.is_available():
        with propagating(model):
            return _with_covariance(call())
    generator = torch.default_generator
    before = generator.get_state()
    with without_draws(model):
        output = call()
    if not torch.equal(generator.get_state(), before):
        generator.set_state(before)
        with propagating(model):
            output = call()
    return _with_covariance(output)


def _with_covariance(output: Tensor) -> Tensor:
    """With the variances of the covariance, which remembers more of what goes together."""
    if not isinstance(output, RandomTensor) or output.covariance_of is None:
        return output
    if output.shape[-1] > FULL_UP_TO:
        return output
    covariance = output.covariance_of()
    mean, _ = output.moments()
    return RandomTensor(mean, covariance.diagonal(dim1=-2, dim2=-1), known(covariance))


@contextmanager
def without_draws(model: nn.Module) -> Iterator[None]:
    """Layers that propagate, and modules that are called by their rules."""
    layers = stochastic_modules(model).values()
    with swapped_samplers(dict.fromkeys(layers, Propagated())), _ruled_modules(model):
        yield


@contextmanager
def _ruled_modules(model: nn.Module) -> Iterator[None]:
    """Let modules that have a rule of their own be called by it."""
    ruled: list[tuple[nn.Module, Any]] = []
    try:
        for module in model.modules():
            rule = rule_of_module(module)
            if rule is not None:
                ruled.append((module, vars(module).get("forward")))
                module.forward = partial(rule, module)
        yield
    finally:
        for module, own in ruled:
            if own is None:
                del module.forward
            else:
                module.forward = own


class _InsteadOfDraws(TorchFunctionMode):
    """Dropout of plain tensors makes random ones; what draws other noise is refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return dropped_out(*args, **kwargs)
        if func in _DRAWS:
            name = getattr(func, "__name__", repr(func))
            raise NoRuleError(
                f"The model draws noise of its own ({name}), for which moments have no rule; use "
                "method='samples', or draw it in a zm layer or nn.Dropout, or give the module that "
                "draws it a rule with zeromean.moments.register."
            )
        return func(*args, **kwargs)
