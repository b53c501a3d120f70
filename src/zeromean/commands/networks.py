"""A network from a file, which describes it or fills what a factory builds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zeromean.compression.export import compressed
from zeromean.files import model as saved
from zeromean.files.safetensors import read_metadata

Kind = Literal["saved", "compressed"]
_KINDS: dict[str, Kind] = {saved.HEADER: "saved", compressed.HEADER: "compressed"}
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def kind_of(path: Path) -> Kind:
    """Who wrote a file: `zm.save`, or `export.save_compressed`."""
    if path.suffix == ".onnx":
        raise ValueError(
            f"{path} is an ONNX file, which onnxruntime runs; give the file of zm.save or "
            "export.save_compressed."
        )
    for header in read_metadata(path):
        if header in _KINDS:
            return _KINDS[header]
    raise ValueError(
        f"{path} is a safetensors file, but not one that zm.save or export.save_compressed wrote."
    )


def load_network(path: Path, factory: str | None) -> nn.Module:
    """The network in a file.

    Args:
        factory: "package.module:function", which builds the architecture that a file of `zm.save`
            fills. A compressed file has its own.
    """
    if kind_of(path) == "compressed":
        if factory is not None:
            raise ValueError(f"{path} describes its network itself; leave --model out.")
        return compressed.load_compressed(path)
    if factory is None:
        raise ValueError(
            f"{path} holds parameters, and no architecture; name what builds the network: "
            "--model package.module:function."
        )
    try:
        return saved.load(path, build_network(factory))
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from error  # torch's has a line each.


def build_network(factory: str) -> nn.Module:
    """What a function "package.module:function" returns. The current folder is looked in first."""
    module_name, _, name = factory.partition(":")
    if not module_name or not name:
        raise ValueError(
            f"--model must be package.module:function, such as zeromean.models:lenet5, got "
            f"{factory!r}."
        )
    with _current_folder_first(), _in_one_sentence(factory):
        found: Any = import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
        network = found if isinstance(found, nn.Module) else found()
    if not isinstance(network, nn.Module):
        raise ValueError(
            f"--model {factory} must build a torch module, but gave a {type(network).__name__}."
        )
    return network


def device_named(name: str) -> torch.device:
    """A device that can be computed on here."""
    try:
        device = torch.device(name)
        if device.type not in _DEVICES:
            raise RuntimeError(f"it is none of {', '.join(_DEVICES)}")
        torch.empty((), device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"--device {name} cannot be used here ({reason}); `zeromean doctor` shows what is "
            "there, and --device cpu always is."
        ) from error
    return device


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """As for `python -m`: a console script looks in its own folder instead."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


@contextmanager
def _in_one_sentence(factory: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Of code that is not ours: anything.
        reason = " ".join(str(error).split()) or "no reason given"
        raise ValueError(
            f"--model {factory} could not be built: {type(error).__name__}: {reason}; it must name "
            "a function in an importable module, and take no arguments."
        ) from error
