"""Where a training runs: kind of device, and how many processes."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import nn

from zeromean.arguments import require_choice, require_integer

Accelerator = Literal["auto", "cpu", "cuda", "gpu", "mps"]
Strategy = Literal["ddp", "fsdp"]


def chosen_accelerator(accelerator: Accelerator) -> str:
    """ "cpu", "cuda" or "mps"; a ValueError where there is no such device here."""
    require_choice("accelerator", accelerator, get_args(Accelerator))
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if accelerator == "auto":
        return "cuda" if has_cuda else "mps" if has_mps else "cpu"
    if accelerator == "gpu":
        accelerator = "mps" if has_mps and not has_cuda else "cuda"
    if not {"cuda": has_cuda, "mps": has_mps, "cpu": True}[accelerator]:
        raise ValueError(
            f"accelerator={accelerator!r} needs a GPU that torch can use, and torch sees none "
            "here; use accelerator='cpu' or 'auto'."
        )
    return accelerator


def require_devices(devices: int, accelerator: str) -> int:
    """So many processes, each with a device of its own where those are GPUs."""
    devices = require_integer("devices", devices, at_least=1)
    there = {"cuda": torch.cuda.device_count(), "mps": 1}.get(accelerator, devices)
    if devices > there:
        raise ValueError(
            f"devices={devices}, but there {'is' if there == 1 else 'are'} {there} of "
            f"{accelerator}; use devices={there}."
        )
    return devices


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model; a ValueError where it has several, or none."""
    places: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        places.setdefault(tensor.device, name)
    if len(places) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in places.items())
        raise ValueError(
            f"The model has parts on several devices ({where}); move it to one: model.to(…)."
        )
    device = next(iter(places), torch.device("cpu"))
    if device.type == "meta":
        raise ValueError(
            "The model is on the device meta, where it has no weights; give it some: "
            "model.to_empty(device='cpu'), and load them."
        )
    return device


def generator_state(device: torch.device) -> Any:
    """The state of the generator from which a device draws noise."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else torch.get_rng_state()


def set_generator_state(device: torch.device, state: Any) -> None:
    """Go back to what `generator_state` returned."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)
    else:
        torch.set_rng_state(state)
