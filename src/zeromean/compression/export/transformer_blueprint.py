"""torch's transformer layers and attention in blueprints: their settings and their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.layers.plain_attention import PlainAttention

_ATTENTION: dict[str, Any] = {
    "MultiheadAttention": nn.MultiheadAttention,
    "PlainAttention": PlainAttention,
}
_BLOCKS: dict[str, Any] = {
    "TransformerEncoderLayer": nn.TransformerEncoderLayer,
    "TransformerDecoderLayer": nn.TransformerDecoderLayer,
}
_STACKS: dict[str, Any] = {
    "TransformerEncoder": nn.TransformerEncoder,
    "TransformerDecoder": nn.TransformerDecoder,
}
KINDS = {kind: name for group in (_ATTENTION, _BLOCKS, _STACKS) for name, kind in group.items()}
_ACTIVATIONS: dict[str, Any] = {"relu": F.relu, "gelu": F.gelu}


def settings_of(module: Any) -> dict[str, Any]:
    """What would build a module of these kinds, apart from its parts."""
    if isinstance(module, PlainAttention):
        return module.geometry()
    if isinstance(module, nn.MultiheadAttention):
        names = ("embed_dim", "num_heads", "dropout", "kdim", "vdim", "batch_first")
        settings = {name: getattr(module, name) for name in (*names, "add_zero_attn")}
        settings["bias"] = module.in_proj_bias is not None
        return settings | {"add_bias_kv": module.bias_k is not None}
    if type(module) in _BLOCKS.values():
        rates = {name: d.p for name, d in module.named_children() if isinstance(d, nn.Dropout)}
        return {
            "norm_first": module.norm_first,
            "activation": _name_of_activation(module),
            "batch_first": module.self_attn.batch_first,
            "dropout": rates,
        }
    return {}


def parts_of(module: Any) -> dict[str, nn.Module]:
    """The modules in it that are described by themselves."""
    if type(module) in _ATTENTION.values():
        return {}  # Its output layer goes with it.
    if type(module) in _STACKS.values():
        norm = {} if module.norm is None else {"norm": module.norm}
        return {**{str(i): layer for i, layer in enumerate(module.layers)}, **norm}
    return {n: m for n, m in module.named_children() if not isinstance(m, nn.Dropout)}


def build_transformer(
    kind: str, settings: dict[str, Any], parts: Mapping[str, Any], own: Mapping[str, Tensor]
) -> nn.Module:
    """The module that was described.

    Args:
        own: Its own tensors, of attention those of its output layer too.
    """
    if kind in _ATTENTION:
        with torch.device("meta"):
            attention = _ATTENTION[kind](**settings)
        attention.load_state_dict(own, assign=True)
        return attention
    if kind in _STACKS:
        layers = [part for name, part in parts.items() if name != "norm"]
        options = {"enable_nested_tensor": False} if kind == "TransformerEncoder" else {}
        with torch.device("meta"):  # The stack is made of copies, which these layers replace.
            stack = _STACKS[kind](layers[0], 1, parts.get("norm"), **options)
        stack.layers, stack.num_layers = nn.ModuleList(layers), len(layers)
        return stack
    features = parts["linear1"].in_features
    with torch.device("meta"):
        block = _BLOCKS[kind](
            *(features, 1, 1),
            activation=_ACTIVATIONS[settings["activation"]],
            batch_first=settings["batch_first"],
            norm_first=settings["norm_first"],
        )
    wanted = {name for name, part in block.named_children() if not isinstance(part, nn.Dropout)}
    if wanted != set(parts):
        raise ValueError(f"got {sorted(parts)} for a {kind}")
    for name, part in parts.items():
        setattr(block, name, part)
    for name, rate in settings["dropout"].items():
        block.get_submodule(name).p = float(rate)
    if type(block.self_attn) is not nn.MultiheadAttention:
        block.activation_relu_or_gelu = 0  # torch's fused path reads weights of attention itself.
    return block


def _name_of_activation(block: Any) -> str:
    for name, function in _ACTIVATIONS.items():
        if block.activation is function:
            return name
    raise ValueError(
        f"A file cannot describe the activation {block.activation!r} of a transformer layer; use "
        "'relu' or 'gelu', or save model.state_dict() and build the module in code."
    )
