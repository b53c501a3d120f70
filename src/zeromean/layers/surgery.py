"""Copies of models, and replacing modules wherever a model refers to them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from zeromean.layers.pretrained import guard_save_pretrained_
from zeromean.layers.stochastic_layer import stochastic_layers

# What every module has.
_TORCHS_OWN = frozenset(vars(nn.Module()))


def replace_modules_(model: nn.Module, replacements: Mapping[Any, nn.Module]) -> nn.Module:
    """Replace modules wherever the model refers to them; returns the model, or its replacement."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, name, replacements[child])
        # Also in lists, tuples and dictionaries, from which a forward function may take them.
        for name, value in own_attributes(parent, (list, tuple, dict)).items():
            replaced = _with_replaced(value, replacements)
            if replaced is not value:
                setattr(parent, name, replaced)
    # torch's fused transformer paths read the weights of their linear layers themselves.
    changed = set(replacements.values())
    fused = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
    parents: list[Any] = [module for module in model.modules() if isinstance(module, fused)]
    for parent in parents:
        if stochastic_layers(parent) or changed & set(parent.modules()):
            parent.activation_relu_or_gelu = 0
            parent.use_nested_tensor = False
    guard_save_pretrained_(model)
    return replacements.get(model, model)


def own_attributes(module: nn.Module, kinds: tuple[type, ...]) -> dict[str, Any]:
    """What a module's class has stored in it, apart from parameters, buffers and modules."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, kinds) and name not in _TORCHS_OWN
    }


def _with_replaced(value: Any, replacements: Mapping[Any, nn.Module]) -> Any:
    """A container with other modules in place of some; itself where there are none."""
    if isinstance(value, nn.Module):
        return replacements.get(value, value)
    if isinstance(value, dict):
        items = {key: _with_replaced(item, replacements) for key, item in value.items()}
        changed = any(items[key] is not item for key, item in value.items())
        return type(value)(items) if changed and type(value) in (dict, OrderedDict) else value
    if type(value) in (list, tuple):
        members = [_with_replaced(item, replacements) for item in value]
        changed = any(new is not old for new, old in zip(members, value, strict=True))
        return type(value)(members) if changed else value
    return value


def copy_with_masks(model: nn.Module) -> nn.Module:
    """A deep copy in which masks of torch.nn.utils.prune are zeros of the weights."""
    # They leave masked weights behind that deepcopy refuses.
    memo = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }
    model = copy.deepcopy(model, memo)
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, torch_prune.BasePruningMethod):
                torch_prune.remove(module, hook._tensor_name)
    return model
