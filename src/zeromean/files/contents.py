"""What is in a file of `zm.save`, without the architecture that it belongs to."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeromean.distributions.from_posterior import FromPosterior, remember_
from zeromean.distributions.posteriors.posterior import Posterior, WeightLayout
from zeromean.distributions.priors import Prior
from zeromean.files import model as saved
from zeromean.files.safetensors import damaged_header, parse_header, read_safetensors
from zeromean.registry import UnregisteredError

# Parameters of the shape of the weight, by posteriors' names for them.
_IN_SHAPE = ("mean", "scale", "log_mean")


@dataclass(frozen=True, kw_only=True)
class RandomWeight:
    """A posterior in a file.

    Attributes:
        layer: The kind of layer that it is the weight of.
        described: Its posterior's and its noise's name, as the file has them.
        posterior: None where no part of that name is registered here, or it has a form of its own.
        knows_layout: Whether the file says all that the KL depends on: of an Embedding it does not
            say which row is padding.
        tied_to: The layer whose weight it is, where there is one before it.
    """

    layer: str
    described: str
    posterior: Posterior | None
    prior: Prior | None
    sampler: str | None
    knows_layout: bool = True
    tied_to: str | None = None


@dataclass(frozen=True)
class Contents:
    """A file that `zm.save` wrote.

    Attributes:
        weights: What is random, by the name of the layer; of an LSTM or GRU by that of each weight.
        tensors: All other parameters and buffers.
        aliases: Further names of tensors that several modules share.
    """

    format_version: int
    weights: dict[str, RandomWeight]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]


def read_contents(path: str | os.PathLike[str]) -> Contents:
    """Read a file of `zm.save`, and rebuild its posteriors from their tensors."""
    text, tensors = read_safetensors(path, saved.HEADER, "zm.save")
    header = parse_header(text, path, saved.FORMAT_VERSION)
    try:
        state = {**tensors, **{name: tensors[other] for name, other in header["aliases"].items()}}
        weights: dict[str, RandomWeight] = {}
        inside: set[str] = set()
        for layer, settings in header["layers"].items():
            for name, prefix in _weights_of(layer, header["layers"], state).items():
                own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
                inside.update(prefix + each for each in own)
                weights[name] = _random_weight(settings, own)
        others = {name: tensor for name, tensor in tensors.items() if name not in inside}
        return Contents(header["format_version"], weights, others, dict(header["aliases"]))
    except Exception as error:  # What a header can say wrong ends in errors of every kind.
        raise damaged_header(path, error) from error


def _weights_of(layer: str, layers: Collection[str], state: dict[str, Tensor]) -> dict[str, str]:
    """What the weights of a layer are called, and how the names of their tensors begin."""
    before = f"{layer}." if layer else ""
    others = tuple(f"{name}." for name in layers if name != layer and name.startswith(before))
    owners = {
        name.rpartition(".")[0].removeprefix(before)
        for name in state
        if name.startswith(before) and not name.startswith(others)
    }
    # The weights of recurrent layers and of attention have names of their own, and some a dot.
    owners = {owner for owner in owners if "weight" in owner.rpartition(".")[2]}
    if owners == {"weight"}:
        return {layer or "the model": f"{before}weight."}
    return {before + owner: f"{before}{owner}." for owner in sorted(owners)}


def _random_weight(settings: dict[str, Any], own: dict[str, Tensor]) -> RandomWeight:
    described = settings["posterior"]
    if settings["noise"] != "normal":
        described += f" of {settings['noise']} noise"
    kind = settings["layer"]
    posterior = prior = None
    with suppress(UnregisteredError):
        prior = saved.prior_of(settings["prior"])
        posterior = _posterior(settings, own)
    return RandomWeight(
        layer=kind,
        described=described,
        posterior=posterior,
        prior=prior,
        sampler=settings.get("sampler"),
        knows_layout=kind != "Embedding",
        tied_to=settings.get("tied_to"),
    )


def _posterior(settings: dict[str, Any], own: dict[str, Tensor]) -> Posterior | None:
    factory = saved.posterior_factory(settings)
    like = next((own[name] for name in _IN_SHAPE if name in own), None)
    if like is None:
        return None  # Of somebody's own making; only its layer knows the shape.
    layout = WeightLayout()
    if settings["layer"] == "Embedding":
        layout = WeightLayout(fan_in=1, neuron_dim=1)
    if settings["layer"] == "ConvTranspose2d":
        # With one α for each filter, their number says in how many groups they lie.
        alphas = own.get("log_alpha", torch.empty(()))
        groups = len(alphas) // like.shape[1] if alphas.dim() == 1 else 1
        layout = WeightLayout(neuron_dim=1, groups=groups)
    posterior = factory(like.shape, layout=layout, device="meta", dtype=like.dtype)
    if isinstance(saved.prior_of(settings["prior"]), FromPosterior):
        remember_(posterior)  # So that there is room for what it was.
    posterior.load_state_dict(own, assign=True)
    return posterior.requires_grad_(False)
