"""ONNX files whose large products run in 8-bit integers: onnxruntime's dynamic quantization."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeromean.compression.speed import one_threaded_session, require_onnxruntime
from zeromean.files.atomic import whole_file


def save_int8_onnx(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write an ONNX file with weights of linear layers in int8, and their inputs rounded in runs.

    Args:
        source: A file of `export.save_onnx`.
        path: The file appears under its name only when it is complete.
    """
    require_onnxruntime()
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load_model(os.fspath(source))
    # What the exporter noted of shapes inside is in conflict with what onnx infers of Gemm.
    del model.graph.value_info[:]
    logging.disable(logging.WARNING)  # On preparations that a file of save_onnx has had.
    try:
        with whole_file(path) as temporary:
            # Convolutions are slower in integers than in float32 here.
            quantize_dynamic(
                model,
                temporary,
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                weight_type=QuantType.QInt8,
            )
    finally:
        logging.disable(logging.NOTSET)


class OnnxNetwork(nn.Module):
    """What an ONNX file predicts, as a network, to be measured like others.

    Args:
        path: The file, with tensors for inputs and one output.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self.session = one_threaded_session(path)

    def forward(self, *inputs: Any) -> Tensor:
        tensors = [x.numpy() for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        names = [put.name for put in self.session.get_inputs()]
        (output,) = self.session.run(None, dict(zip(names, tensors, strict=True)))
        return torch.from_numpy(output)
