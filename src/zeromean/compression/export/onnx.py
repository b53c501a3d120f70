"""Compressed networks as ONNX files."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeromean.arguments import require_model
from zeromean.compression.analysis import run_example
from zeromean.compression.export.compressed import SavedFile, _saved
from zeromean.compression.modules.batch_last import BatchLast
from zeromean.compression.modules.sparse_layers import SparseConv2d, SparseLinear
from zeromean.extras import how_to_install
from zeromean.files.atomic import whole_file
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.layers.surgery import copy_with_masks, replace_modules_


def save_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Tensor | tuple[Any, ...],
    *,
    original: nn.Module | None = None,
) -> SavedFile:
    """Write a model as ONNX, for any batch size (dimension 0 of every tensor that goes in).

    Sparse layers are written dense: ONNX has no faster way for them. What a variance layer draws,
    it draws anew in every run (RandomNormalLike).

    Args:
        model: What `zm.compress` returned, or any model that torch can export.
        path: The file appears under its name only when it is complete.
        example_inputs: Inputs of the right shape and type, with at least two examples.
        original: As for `save_compressed`.
    """
    require_model(model)
    if original is not None:
        require_model(original, "original")
    onnx = _require_onnx()
    arguments = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    run_example(model, arguments)
    with whole_file(path) as temporary:
        twin = _dense_twin(model)
        onnx.save_model(_onnx_program(twin, arguments, len(stochastic_modules(twin))), temporary)
    return _saved(path, original)


def _onnx_program(
    dense: nn.Module,
    arguments: tuple[Any, ...],
    num_draws: int,
    names: Sequence[str] | None = None,
    noise: dict[str, Tensor] | None = None,
) -> Any:
    """The model as ONNX.

    Args:
        num_draws: How often the graph must draw, at least; anything else would be a constant.
        names: What its outputs are called.
        noise: Tensors that are inputs too, whatever the batch size, as the keyword `noise`.
    """
    batch = torch.export.Dim.DYNAMIC
    shapes: Any = tuple(
        {0: batch} if isinstance(a, Tensor) and a.dim() else None for a in arguments
    )
    keywords: dict[str, Any] = {}
    if noise is not None:
        keywords["kwargs"] = {"noise": noise}
    if names is not None:
        shapes = {"inputs": shapes} | ({} if noise is None else {"noise": dict.fromkeys(noise)})
        single = len(arguments) == 1
        inputs = ["input"] if single else [f"input_{index}" for index in range(len(arguments))]
        keywords["input_names"] = [*inputs, *(name.replace(".", "_") for name in noise or {})]
        keywords["output_names"] = list(names)
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                dense, arguments, dynamo=True, dynamic_shapes=shapes, verbose=False, **keywords
            )
        proto = program.model_proto
    except Exception as error:
        cause = error.__cause__ or error
        reason = (str(cause).strip() or repr(cause)).splitlines()[0]
        raise ValueError(
            f"ONNX cannot hold this model ({reason}); compress it first, and keep to operations "
            "that torch.onnx exports."
        ) from error
    draws = sum(node.op_type.startswith("Random") for node in proto.graph.node)
    if draws < num_draws:
        raise ValueError(
            "ONNX would freeze the noise of a stochastic layer to a constant; export "
            "zm.to_deterministic(model), or a compressed model without such layers."
        )
    return proto


def _dense_twin(model: nn.Module) -> nn.Module:
    """A copy with dense layers in place of those that only torch can run."""
    model = copy_with_masks(model)
    sparse = (SparseLinear, SparseConv2d)
    model = replace_modules_(
        model, {m: m.dense() for m in model.modules() if isinstance(m, sparse)}
    )
    chains = [m for m in model.modules() if isinstance(m, BatchLast)]
    return replace_modules_(model, {chain: chain.unrolled() for chain in chains}).eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks on packages that nobody asked for and on its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            # Of nn.LSTM and nn.GRU, which assign to themselves in every call.
            warnings.filterwarnings("ignore", "The tensor attributes .*_flat_weights")
            yield
    finally:
        logger.setLevel(level)


def _require_onnx() -> Any:
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            how_to_install("ONNX files need onnx and onnxscript", "export")
        ) from error
    return onnx
