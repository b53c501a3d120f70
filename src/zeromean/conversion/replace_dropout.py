"""torch's Dropout, replaced by noise whose rate can be learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.arguments import require_model, require_predicate, shown
from zeromean.layers.blocks import restored_modes
from zeromean.layers.dropout.unit_noise import UnitNoise
from zeromean.layers.surgery import replace_modules_
from zeromean.prediction.inputs import as_arguments
from zeromean.prediction.randomness import forked_generators

# How many dimensions of its input drop together as the units of our noise do.
_DIMENSIONS = {nn.Dropout: 2, nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}


def replace_dropout_(
    model: nn.Module,
    noise: Callable[[int, float], UnitNoise],
    *,
    inputs: Any,
    where: Callable[[str, nn.Module], bool] | None = None,
) -> list[str]:
    """Replace every Dropout of a model by noise on units at the same rate, in place.

    Units are neurons `(N, C)` for nn.Dropout, and whole channels for nn.Dropout1d to 3d. An error
    leaves the model as it was. Returns the names of what was replaced.

    Args:
        noise: Makes the noise from the number of units and the drop rate, such as
            `lambda units, p: zm.BinaryDropout(units, p, learn="concrete")`, or
            `partial(zm.GaussianDropout, learn=False)`.
        inputs: A batch of inputs, by which the numbers of units are found.
        where: Predicate of name and module that selects. Default: every Dropout.
    """
    require_model(model)
    require_predicate(where)
    if isinstance(noise, UnitNoise) or not callable(noise):
        raise TypeError(
            "noise must be a function of the number of units and the drop rate, got "
            f"{shown(noise)}; use lambda units, p: zm.BinaryDropout(units, p)."
        )
    found: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if type(module) in _DIMENSIONS and (where is None or where(name, module))
    }
    if not found:
        raise ValueError(
            "There is no Dropout to replace; F.dropout in a forward function cannot be seen, make "
            "it an nn.Dropout."
        )
    seen = _inputs_of(model, found, inputs)
    new: dict[nn.Module, nn.Module] = {}
    for name, module in found.items():
        _require_units(name, module, seen.get(module))
        x = seen[module]
        made = noise(x.shape[1], module.p)
        if not isinstance(made, UnitNoise):
            raise TypeError(f"noise must make noise on units, but made {shown(made)} for {name}.")
        new[module] = made.to(x.device, x.dtype).train(module.training)
    replace_modules_(model, new)
    return list(found)


def _inputs_of(
    model: nn.Module, modules: dict[str, nn.Module], inputs: Any
) -> dict[nn.Module, Tensor]:
    """What each module gets when the model is called."""
    seen: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[module] = args[0].detach()

    handles = [module.register_forward_pre_hook(note) for module in modules.values()]
    args, kwargs = as_arguments(inputs)
    try:
        with restored_modes(model), torch.no_grad(), forked_generators(model):
            model.eval()(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _require_units(name: str, module: nn.Module, x: Tensor | None) -> None:
    if x is None:
        raise ValueError(
            f"{name} was not called with these inputs, so that the number of its units is not "
            "known; leave it out by where=."
        )
    wanted = _DIMENSIONS[type(module)]
    if x.dim() != wanted:
        raise ValueError(
            f"{name} is a {type(module).__name__}, which drops whole units of inputs with {wanted} "
            f"dimensions, got shape {tuple(x.shape)}; leave it out by where=."
        )
