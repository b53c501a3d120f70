"""Files of compressed networks, and ONNX: the way into `zeromean.compression.export`."""

from zeromean.compression.export.compressed import (
    SavedFile,
    compressed_size,
    load_compressed,
    save_compressed,
)
from zeromean.compression.export.onnx import save_onnx
from zeromean.compression.export.onnx_predictions import save_onnx_moments, save_onnx_samples

__all__ = [
    "SavedFile",
    "compressed_size",
    "load_compressed",
    "save_compressed",
    "save_onnx",
    "save_onnx_moments",
    "save_onnx_samples",
]
