"""Whole networks: conversion, prediction, pruning, compression, and files of the result."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeromean as zm
from fuzzing.outcomes import CHECKED, refused, require, spoil
from zeromean import export

POSTERIORS = (
    None,
    zm.Additive,
    zm.ZeroMean,
    partial(zm.Additive, log_variance=-4.0),
    partial(zm.Multiplicative, share="weight"),
    partial(zm.Multiplicative, share="neuron"),
    partial(zm.ZeroMean, noise=zm.rademacher),
)


def prepare(folder: Path) -> Callable[[random.Random], str]:
    return partial(case, folder)


def case(folder: Path, generator: random.Random) -> str:
    model, x = _network(generator)
    arguments: dict[str, Any] = {
        "posterior": generator.choice(POSTERIORS),
        "where": generator.choice((None, None, lambda name, _: name != "0")),
    }
    if spoil(arguments, generator, 0.1) is not None:
        try:
            zm.make_stochastic_(model, **arguments)
        except (TypeError, ValueError) as error:
            return refused(error)
    else:
        zm.make_stochastic_(model, **arguments)
    model.eval()
    what = generator.choice((_predict, _predict, _prune, _compress, _store, _determine))
    return what(model, x, generator, folder)


def _network(generator: random.Random) -> tuple[nn.Module, Tensor]:
    pick = generator.choice
    classes, batch = pick((1, 2, 3)), pick((1, 2, 4))
    width = pick((3, 5, 8))
    act = pick((nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid))
    if pick((True, False)):
        features = pick((2, 4))
        layers = [nn.Linear(features, width), act(), *([nn.BatchNorm1d(width)] * pick((0, 1)))]
        layers += [nn.Dropout(0.2)] * pick((0, 1))
        layers += [nn.Linear(width, classes, bias=pick((True, False)))]
        return nn.Sequential(*layers), torch.randn(batch, features)
    layers = [nn.Conv2d(1, width, 3, padding=pick((0, 1))), act()]
    layers += [nn.MaxPool2d(2)] * pick((0, 1))
    layers += [nn.Flatten()]
    x = torch.randn(batch, 1, 6, 6)
    size = nn.Sequential(*layers)(x).shape[1]
    return nn.Sequential(*layers, nn.Linear(size, classes)), x


def _predict(model: nn.Module, x: Tensor, generator: random.Random, folder: Path) -> str:
    pick = generator.choice
    arguments: dict[str, Any] = {
        "inputs": x,
        "num_samples": pick((1, 2, 7)),
        "seed": pick((None, 0, 3)),
        "chunk_size": pick((None, 1, 3)),
        "batch_size": pick((None, 1, 2)),
        "sampler": pick((None, zm.weight, zm.mean, zm.moment_matched, zm.flipout, "auto")),
    }
    by_class = pick((True, False))
    if by_class:
        arguments["link"] = pick(("softmax", "sigmoid"))
    spoiled = spoil(arguments, generator, 0.3)
    if isinstance(arguments["num_samples"], int) and arguments["num_samples"] > 100:
        arguments["num_samples"] = 100  # It would draw them.
    before = torch.get_rng_state()
    try:
        if by_class:
            result = zm.predict_proba(model, **arguments)
        else:
            result = zm.sample_outputs(model, **arguments)
    except (TypeError, ValueError) as error:
        one_class = by_class and arguments["link"] == "softmax" and model[-1].out_features == 1
        require(spoiled is not None or one_class, f"sound arguments were refused: {error!r}")
        return refused(error)
    require(result.isfinite().all(), "a prediction is not finite")
    if spoiled is not None:
        return CHECKED
    classes = model[-1].out_features
    if by_class:
        require(result.shape == (len(x), classes), f"probabilities of shape {result.shape}")
        require(((result >= 0) & (result <= 1)).all(), "probabilities outside of [0, 1]")
        if arguments["link"] == "softmax":
            torch.testing.assert_close(result.sum(-1), torch.ones(len(x)))
    else:
        require(result.shape == (arguments["num_samples"], len(x), classes), f"{result.shape}")
    if arguments["seed"] is not None:
        require(torch.equal(before, torch.get_rng_state()), "a seed touched the generator")
        function = zm.predict_proba if by_class else zm.sample_outputs
        require(torch.equal(result, function(model, **arguments)), "a seed gave two draws")
    if arguments["sampler"] is zm.mean and not by_class and not _has_dropout(model):
        with zm.sampling(model, zm.mean), torch.no_grad():
            torch.testing.assert_close(result[0], model(x), rtol=1e-4, atol=1e-5)
    return CHECKED


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) for module in model.modules())


def _prune(model: nn.Module, x: Tensor, generator: random.Random, folder: Path) -> str:
    pick = generator.choice
    wanted = pick((0.0, 0.3, 0.9, 1.0))
    arguments: dict[str, Any] = {
        "by": pick(("snr", "variance")),
        "sparsity": wanted,
        "scope": pick(("layer", "global")),
        "unit": pick(("weight", "neuron")),
    }
    spoiled = spoil(arguments, generator, 0.3)
    weights = {name: layer.weight for name, layer in zm.stochastic_layers(model).items()}
    try:
        zm.prune_(model, **arguments)
    except (TypeError, ValueError) as error:
        return refused(error)
    counted = zm.sparsity(model)
    left = sum(
        int(weight.numel() if weight.mask is None else weight.mask.sum())
        for weight in weights.values()
    )
    plain = sum(
        int(module.weight.count_nonzero())
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and name not in weights
    )
    require(
        counted.total.kept == left + plain, f"{counted.total.kept} counted, {left + plain} left"
    )
    for weight in weights.values():
        if weight.mask is not None:
            draw = weight.sample()
            require((draw[~weight.mask] == 0).all(), "a pruned weight is not zero")
            if spoiled is None and arguments["scope"] == "layer" and arguments["unit"] == "weight":
                part = 1 - weight.mask.double().mean()
                require(abs(part - wanted) <= 1 / weight.numel() + 1e-9, f"{part} for {wanted}")
    return CHECKED


def _compress(model: nn.Module, x: Tensor, generator: random.Random, folder: Path) -> str:
    arguments = {"sparsity": generator.choice((0.3, 0.5, 0.9)), "where": _selects(_has_own_alpha)}
    if not any(_has_own_alpha(layer.weight) for layer in zm.stochastic_layers(model).values()):
        return _determine(model, x, generator, folder)
    zm.prune_(model, by="snr", **arguments)
    if _has_no_means(model):
        return _determine(model, x, generator, folder)
    small = zm.compress(zm.to_deterministic(model).eval())
    path = folder / "small.safetensors"
    export.save_compressed(small, path)
    with torch.no_grad(), zm.sampling(model, zm.mean):
        torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(export.load_compressed(path)(x), small(x))
    return CHECKED


def _has_no_means(model: nn.Module) -> bool:
    return any(not layer.weight.has_mean for layer in zm.stochastic_layers(model).values())


def _selects(condition: Callable[[Any], bool]) -> Callable[[str, Any], bool]:
    return lambda _, layer: isinstance(layer, zm.StochasticLayer) and condition(layer.weight)


def _has_own_alpha(weight: Any) -> bool:
    return isinstance(weight, zm.Additive) or getattr(weight, "share", "") == "weight"


def _store(model: nn.Module, x: Tensor, generator: random.Random, folder: Path) -> str:
    path = folder / "model.safetensors"
    zm.save(model, path)
    expected = zm.sample_outputs(model, x, 2, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)  # The file has what this loses.
    loaded = zm.load(path, model).eval()
    same = torch.equal(zm.sample_outputs(loaded, x, 2, seed=0), expected)
    require(same, "a file draws otherwise")
    return CHECKED


def _determine(model: nn.Module, x: Tensor, generator: random.Random, folder: Path) -> str:
    try:
        plain = zm.to_deterministic(model).eval()
    except ValueError as error:
        require(_has_no_means(model), f"layers with means were refused: {error!r}")
        return refused(error)
    require(not _has_no_means(model), "a zero-mean layer was made a constant")
    require(not zm.stochastic_layers(plain), "a stochastic layer is left")
    with torch.no_grad(), zm.sampling(model, zm.mean):
        torch.testing.assert_close(plain(x), model(x), rtol=1e-4, atol=1e-5)
    return CHECKED
