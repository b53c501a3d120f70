"""What is measured of a sparse network: error, compression, sparsity, and bits after rounding.

Errors are those of mean propagation, in per cent of the test images. Compression is the number of
weights over the number of those left, as in the literature.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import zeromean as zm
from zeromean.compression.prune import EmptiedWarning

if TYPE_CHECKING:
    from zeromean.data import ImageSet

# log α above which weights are pruned, and for the curve of errors by compression lower ones: what
# lies above the first is gone from the training on.
THRESHOLDS = (3.0, 2.0, 1.0, 0.0, -1.0, -2.0)


def pruned_copy(model: nn.Module, threshold: float = THRESHOLDS[0]) -> nn.Module:
    """A copy, pruned where log α is above a threshold."""
    pruned = copy.deepcopy(model)
    with warnings.catch_warnings():
        # Early in the training, and with random labels, nothing may be left of a layer.
        warnings.simplefilter("ignore", EmptiedWarning)
        zm.prune_(pruned, threshold=threshold)
    return pruned.eval()


def measure(model: nn.Module, test: ImageSet) -> dict[str, Any]:
    """Error, compression and the sparsity of every layer, in per cent."""
    left = zm.sparsity(model)
    return {
        "error": error(model, test),
        "compression": left.total.compression,
        "kept": left.total.kept,
        "sparsity": {layer.name: 100 * layer.sparsity for layer in left.layers},
    }


def error_and_compression(model: nn.Module, threshold: float, test: ImageSet) -> dict[str, float]:
    """The same two numbers for another threshold."""
    pruned = pruned_copy(model, threshold)
    return {"error": error(pruned, test), "compression": zm.sparsity(pruned).total.compression}


@torch.no_grad()
def error(model: nn.Module, data: ImageSet) -> float:
    """Per cent of images that mean propagation gets wrong."""
    with zm.sampling(model, zm.mean):
        scores = torch.cat([model(batch) for batch in data.images.split(1000)])
    return 100 * (scores.argmax(-1) != data.labels).double().mean().item()


def averaged_error(model: nn.Module, data: ImageSet, num_samples: int = 20) -> float:
    """The same for probabilities averaged over samples."""
    proba = [zm.predict_proba(model, x, num_samples, seed=0) for x in data.images.split(1000)]
    return 100 * (torch.cat(proba).argmax(-1) != data.labels).double().mean().item()


def quantized(pruned: nn.Module, test: ImageSet) -> dict[str, Any]:
    """Error, bytes and bits after rounding by the posterior, for each layer, neuron or weight."""
    results: dict[str, Any] = {}
    for per in ("layer", "neuron", "weight"):
        for tolerance in (0.5, 1.0):
            rounded = copy.deepcopy(pruned)
            report = zm.quantize_(rounded, per=per, tolerance=tolerance)
            kept = sum(layer.nonzero for layer in report.layers)
            results.setdefault(per, {})[f"tolerance {tolerance:g}"] = {
                "error": error(rounded, test),
                "bytes": report.size,
                "compression": report.compression,
                "bits": sum(layer.bits * layer.nonzero for layer in report.layers) / max(kept, 1),
            }
    return results
