"""Noise on what layers read (`zm.add_unit_noise_`), in the header of a model's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.layers.dropout.hidden_noise import HiddenNoise, attach_hidden_, hidden_noises
from zeromean.layers.dropout.input_noise import InputNoise, attach_, input_noises
from zeromean.layers.dropout.log_normal import LogNormalDropout
from zeromean.layers.plain_attention import call_output_layers_


class OtherModelError(ValueError):
    """A file and the model that it is to fill are of different architectures."""


def describe_input_noise(model: nn.Module) -> list[dict[str, Any]]:
    """What would put the noise back: for each group of units its settings and its readers."""
    described: dict[nn.Module, dict[str, Any]] = {}
    for name, found in (*input_noises(model).items(), *hidden_noises(model).items()):
        noise = found.noise
        if not isinstance(noise, LogNormalDropout):
            raise ValueError(
                f"A file cannot describe {type(noise).__name__} in front of {name}; save "
                "model.state_dict() instead."
            )
        settings = {
            "num_features": noise.num_features,
            "low": noise.low,
            "high": noise.high,
            "location": noise.initial_location,
            "log_scale": noise.initial_log_scale,
            "kl_weight": noise.kl_weight,
        }
        group = described.setdefault(noise, {"settings": settings, "readers": {}})
        if isinstance(found, HiddenNoise):
            group.setdefault("hidden", {})[name] = found.index.numel()
        else:
            group["readers"][name] = {"inputs": found.index.numel(), "last": found.last}
    return list(described.values())


def rebuild_input_noise_(
    model: nn.Module, groups: list[dict[str, Any]], tensors: Mapping[str, Tensor], path: Any
) -> None:
    """Put the noise that a header describes in front of the layers that it names.

    Args:
        tensors: Those of the file, by which nothing is allocated that is not in it.
    """
    call_output_layers_(model, {name for group in groups for name in group["readers"]})
    modules: dict[str, Any] = dict(model.named_modules())
    present = {*input_noises(model), *hidden_noises(model)}
    for group in groups:
        hidden = group.get("hidden", {})
        missing = [name for name in (*group["readers"], *hidden) if name not in modules]
        if missing:
            raise OtherModelError(
                f"{path} has noise on what {missing[0]!r} reads, but the model has nothing there; "
                "build the architecture that was saved."
            )
        if all(name in present for name in (*group["readers"], *hidden)):
            continue
        places = {f"{name}.unit_noise": name for name in group["readers"]}
        places |= {f"{name}.hidden_noise": name for name in hidden}
        first = next(iter(places.values()))
        for name, reader in group["readers"].items():
            if tensors[f"{name}.unit_noise.index"].numel() != reader["inputs"]:
                raise ValueError(f"the noise in front of {name} is not of the size of its header")
        for name, units in hidden.items():
            if tensors[f"{name}.hidden_noise.index"].numel() != units:
                raise ValueError(f"the noise inside of {name} is not of the size of its header")
        # What several layers share stands in a file once.
        keep = next(f"{p}.noise.keep" for p in places if f"{p}.noise.keep" in tensors)
        if tensors[keep].numel() != group["settings"]["num_features"]:
            raise ValueError(f"the noise in front of {first} is not of the size of its header")
        like = next(modules[first].parameters())
        noise = LogNormalDropout(**group["settings"], device=like.device, dtype=like.dtype)
        for name, reader in group["readers"].items():
            index = torch.zeros(reader["inputs"], dtype=torch.long, device=like.device)
            attach_(modules[name], InputNoise(noise, index, reader["last"]))
        for name, units in hidden.items():
            index = torch.zeros(units, dtype=torch.long, device=like.device)
            attach_hidden_(modules[name], HiddenNoise(noise, index))
