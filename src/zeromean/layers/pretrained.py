"""Stochastic models refuse `save_pretrained`, the method by which Hugging Face's models save.

It would write the state dict under the names of the posteriors' parameters. `from_pretrained`
builds the plain architecture, finds none of its weights in that file and draws new ones, without an
error.

The refusal is an attribute of the model itself, under the method's name. A class cannot do it:
there is no hook, subclasses call each other's method, and `push_to_hub` and trainers call it on the
model.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from zeromean.layers.stochastic_module import stochastic_modules

_NAME = "save_pretrained"


def guard_save_pretrained_(model: nn.Module) -> None:
    """Let everything in a model that has `save_pretrained` refuse, if it is stochastic.

    What is plain (again) gets its own method back.
    """
    for module in model.modules():
        if not callable(getattr(type(module), _NAME, None)):
            continue
        if stochastic_modules(module):
            setattr(module, _NAME, refuse_to_save_pretrained)
        elif vars(module).get(_NAME) is refuse_to_save_pretrained:
            delattr(module, _NAME)


def refuse_to_save_pretrained(*args: Any, **kwargs: Any) -> NoReturn:
    """What stands for `save_pretrained`: a function, which copies and pickle find by its name."""
    raise TypeError(
        "save_pretrained would lose the posteriors of this model: from_pretrained builds the plain "
        "architecture, and draws new weights where it finds none. Use zm.save(model, path), and "
        "zm.load(path, plain_model) for which model.config.save_pretrained(folder) keeps the "
        "architecture; or zm.to_deterministic(model).save_pretrained(folder) for the plain network."
    )
