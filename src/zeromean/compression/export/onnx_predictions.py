"""Predictions of random networks as ONNX files: by moments, or by samples inside of the graph."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zeromean.arguments import require_choice, require_integer, require_model
from zeromean.compression.analysis import run_example
from zeromean.compression.export.compressed import SavedFile, _saved
from zeromean.compression.export.onnx import (
    _dense_twin,
    _onnx_program,
    _require_onnx,
)
from zeromean.files.atomic import whole_file
from zeromean.functional.random_logits import FIXED_POINTS, expected_sigmoid
from zeromean.layers.blocks import draw_noise, held_noise, monte_carlo_modes
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.moments import RandomTensor
from zeromean.moments.attention import softmax_moments
from zeromean.moments.propagation import without_draws
from zeromean.prediction.inputs import logits_in
from zeromean.prediction.probabilities import Link

# Nodes that give other numbers in every run.
_DRAWS = (
    "RandomNormalLike",
    "RandomNormal",
    "RandomUniformLike",
    "RandomUniform",
    "Bernoulli",
    "Dropout",
)


class _Outputs(NamedTuple):
    """The outputs of the graph, by their names."""

    probabilities: Tensor
    entropy: Tensor
    variance: Tensor


def save_onnx_moments(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Tensor | tuple[Any, ...],
    *,
    link: Link = "softmax",
) -> SavedFile:
    """Write a random network as one deterministic ONNX graph that predicts with uncertainty.

    The graph carries means and variances (docs, Moments) and draws nothing. Its outputs are
    `probabilities`, `entropy` (of the probabilities, in nats) and `variance` (of the probabilities,
    over the noise), for any batch size.

    Args:
        model: A network whose operations have rules for moments; it returns logits.
        path: The file appears under its name only when it is complete.
        example_inputs: Inputs of the right shape and type, with at least two examples.
        link: As for `zm.predict_proba`.
    """
    require_choice("link", link, ("softmax", "sigmoid"))
    return _save(_ByMoments(_checked(model), link), path, example_inputs, num_draws=0)


def save_onnx_samples(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Tensor | tuple[Any, ...],
    *,
    num_samples: int = 20,
    noise: Literal["onnx", "input"] = "onnx",
    link: Link = "softmax",
) -> SavedFile:
    """Write a random network as an ONNX graph with samples inside.

    Each sample is one network for the whole batch, whose weights are drawn (`zm.weight`). Outputs
    are `probabilities`, `entropy` and `variance`, as of `save_onnx_moments`.

    Args:
        model: A network with stochastic layers; it returns logits.
        path: The file appears under its name only when it is complete.
        example_inputs: Inputs of the right shape and type, with at least two examples.
        num_samples: Networks that are drawn in each run.
        noise: Who draws it: "onnx" the graph, anew in every run of a session (RandomNormalLike);
            "input" whoever runs it, who passes standard normal numbers, `(num_samples, *shape)`,
            under the names of `zm.draw_noise(model)` with `_` for dots. The same noise gives the
            same numbers.
        link: As for `zm.predict_proba`.
    """
    require_choice("link", link, ("softmax", "sigmoid"))
    require_choice("noise", noise, ("onnx", "input"))
    num_samples = require_integer("num_samples", num_samples, at_least=1)
    layers = stochastic_modules(_checked(model))
    if not layers:
        raise ValueError("The model has no stochastic layer, so that all samples were the same.")
    shapes = {name: tuple(drawn.shape) for name, drawn in draw_noise(model).items()}
    samples = _BySamples(model, link, num_samples, shapes)
    if noise == "onnx":
        drawn = len(shapes)
        return _save(samples, path, example_inputs, num_draws=drawn)
    given = {name: torch.randn(num_samples, *shape) for name, shape in shapes.items()}
    return _save(samples, path, example_inputs, num_draws=0, noise=given)


class _ByMoments(nn.Module):
    def __init__(self, model: nn.Module, link: Link):
        super().__init__()
        self.model = model
        self.link: Link = link
        self.training = False

    def forward(self, *inputs: Any) -> _Outputs:
        outputs = logits_in(self.model(*inputs))
        if not isinstance(outputs, RandomTensor):
            outputs = RandomTensor(outputs, torch.zeros_like(outputs))
        if self.link == "sigmoid":
            yes, variance, _ = expected_sigmoid(*outputs.moments())
            return _Outputs(yes, _entropy(yes, self.link), variance)
        found = softmax_moments(outputs, num_points=FIXED_POINTS)
        return _Outputs(found.mean, _entropy(found.mean, self.link), found.variance)


class _BySamples(nn.Module):
    def __init__(
        self, model: nn.Module, link: Link, num_samples: int, shapes: dict[str, tuple[int, ...]]
    ):
        super().__init__()
        self.model = model
        self.link: Link = link
        self.num_samples = num_samples
        self.shapes = shapes
        self.training = False

    def forward(self, *inputs: Any, noise: dict[str, Tensor] | None = None) -> _Outputs:
        if noise is None:
            zeros = {n: torch.zeros(self.num_samples, *shape) for n, shape in self.shapes.items()}
            noise = {name: torch.randn_like(zero) for name, zero in zeros.items()}
        probabilities = []
        for index in range(self.num_samples):
            with held_noise(self.model, {name: drawn[index] for name, drawn in noise.items()}):
                outputs = logits_in(self.model(*inputs))
            one = outputs.sigmoid() if self.link == "sigmoid" else outputs.softmax(-1)
            probabilities.append(one)
        every = torch.stack(probabilities)
        mean = every.mean(0)
        variance = (every - mean).square().mean(0)
        return _Outputs(mean, _entropy(mean, self.link), variance)


def _entropy(probabilities: Tensor, link: Link) -> Tensor:
    tiny = torch.finfo(probabilities.dtype).tiny
    yes = probabilities * probabilities.clamp_min(tiny).log()
    if link == "softmax":
        return -yes.sum(-1)
    no = 1 - probabilities
    return -(yes + no * no.clamp_min(tiny).log())


def _checked(model: nn.Module) -> nn.Module:
    require_model(model)
    return _dense_twin(model)


def _save(
    predictor: _ByMoments | _BySamples,
    path: str | os.PathLike[str],
    example_inputs: Tensor | tuple[Any, ...],
    *,
    num_draws: int,
    noise: dict[str, Tensor] | None = None,
) -> SavedFile:
    onnx = _require_onnx()
    arguments = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    run_example(predictor.model, arguments)
    with monte_carlo_modes(predictor.model):
        if isinstance(predictor, _ByMoments):
            with without_draws(predictor.model):
                with torch.no_grad():
                    predictor(
                        *arguments
                    )  # For its errors, and for tables that a trace cannot make.
                proto = _onnx_program(predictor, arguments, num_draws, _Outputs._fields)
        else:
            proto = _onnx_program(predictor, arguments, num_draws, _Outputs._fields, noise)
    found = sum(node.op_type in _DRAWS for node in proto.graph.node)
    if num_draws == 0 and found:
        raise ValueError(
            "The model draws noise that is not that of its stochastic layers (nn.Dropout, for "
            "one), which a graph with noise='input' would draw by itself; use noise='onnx'."
        )
    with whole_file(path) as temporary:
        onnx.save_model(proto, temporary)
    return _saved(path, None)
