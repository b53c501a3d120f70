"""What each runtime makes of weights that are zero one by one: known before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from zeromean.arguments import require_model
from zeromean.compression.compress import plain_copy
from zeromean.compression.inventory import layers_of
from zeromean.compression.rewrite.sparsify import could_be_sparse


@dataclass(frozen=True)
class SparseRuntimes:
    """What unstructured sparsity can bring a model; `print` shows one sentence.

    Attributes:
        torch: Part of the weights that torch could multiply sparsely: those in large linear layers
            and, for batches, in simple convolutions.
        torch_compile: The same under torch.compile, which convolves densely.
        onnxruntime: The same of onnxruntime, which multiplies zeros like all other weights.
        layers: Names of the layers that torch could multiply sparsely.
    """

    torch: float
    torch_compile: float
    onnxruntime: float
    layers: tuple[str, ...]

    def __str__(self) -> str:
        if self.layers:
            bound = "once at most 1/16 of a linear layer or half of a convolution is left"
            in_torch = (
                f"torch can skip them in {self.torch:.0%} of the weights ({_few(self.layers)}), "
                f"{bound}, torch.compile in {self.torch_compile:.0%}"
            )
        else:
            in_torch = "torch skips them in no layer of this network, nor does torch.compile"
        return (
            f"Weights that are zero one by one make smaller files; {in_torch}; onnxruntime "
            "multiplies by zeros as by other weights and gets no faster, for which whole units "
            "must go (zm.add_unit_noise_, zeromean.training.shrink)."
        )


def sparse_runtimes(model: nn.Module) -> SparseRuntimes:
    """What torch, torch.compile and onnxruntime will make of unstructured sparsity.

    A function of the model alone, trained or not, to be asked before its weights are made sparse
    (`zm.Additive`, `shrink(…, sparse_weights=True)`).
    """
    require_model(model)
    sizes: dict[str, int] = {}
    linear: list[str] = []
    fit: list[str] = []
    for name, layer in layers_of(plain_copy(model)).items():
        weights = [p for n, p in layer.named_parameters(recurse=False) if "weight" in n]
        size = sum(p.numel() for p in weights if p.dim() > 1)
        if size:
            sizes[name] = size
            fit += [name] * could_be_sparse(layer)
            linear += [name] * (name in fit and isinstance(layer, nn.Linear))
    if not sizes:
        raise ValueError("The model has no weights that could become sparse.")
    total = sum(sizes.values())
    in_torch, compiled = (sum(sizes[n] for n in names) / total for names in (fit, linear))
    return SparseRuntimes(in_torch, compiled, 0.0, tuple(fit))


def _few(names: tuple[Any, ...]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
