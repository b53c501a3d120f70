"""How many weights a model has, and how many are left after pruning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from zeromean.arguments import require_model
from zeromean.compression.modules.sparse_layers import SparseLinear
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.text_table import text_table


@dataclass(frozen=True)
class LayerSparsity:
    """One row of `zm.sparsity`.

    Attributes:
        name: Name of the layer, or of the weight where a layer has several.
        weights: Number of weights; biases do not count.
        kept: Those that are not pruned, of deterministic layers those that are not zero.
        bits: Bits of a kept weight.
    """

    name: str
    weights: int
    kept: int
    bits: float

    @property
    def sparsity(self) -> float:
        """Part of the weights that is gone."""
        return 1 - self.kept / self.weights if self.weights else 0.0

    @property
    def compression(self) -> float:
        """weights / kept, the compression factor of the sparse variational dropout literature."""
        return self.weights / self.kept if self.kept else math.inf


@dataclass(frozen=True)
class Sparsity:
    """What is left of a model, layer by layer; `print` shows it as a table."""

    layers: tuple[LayerSparsity, ...]

    @property
    def total(self) -> LayerSparsity:
        """All layers together."""
        weights = sum(layer.weights for layer in self.layers)
        kept = sum(layer.kept for layer in self.layers)
        bits = sum(layer.bits * layer.kept for layer in self.layers) / kept if kept else 0.0
        return LayerSparsity("total", weights, kept, bits)

    def __getitem__(self, name: str) -> LayerSparsity:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def __str__(self) -> str:
        rows = [("layer", "weights", "kept", "sparsity", "bits", "compression")]
        rows += [
            (
                row.name,
                f"{row.weights:,}",
                f"{row.kept:,}",
                f"{row.sparsity:.2%}",
                f"{row.bits:.3g}",
                f"{row.compression:,.1f}×",
            )
            for row in (*self.layers, self.total)
        ]
        return "\n".join(text_table(rows))


def sparsity(model: nn.Module) -> Sparsity:
    """Count the weights of every layer and those that are left, pruned or not.

    Every weight tensor counts once: posteriors, and the parameters of deterministic layers with
    two or more dimensions, including those masked by `torch.nn.utils.prune`. Of a compressed model
    the layers count as they are now, without the units that were removed.
    """
    require_model(model)
    rows = []
    counted: dict[int, Posterior | Tensor] = {}
    for name, weight in _weights(model):
        if id(weight) in counted:
            continue
        counted[id(weight)] = weight
        if isinstance(weight, Posterior):
            kept = weight.numel() if weight.mask is None else int(weight.mask.sum())
        else:
            kept = int(weight.count_nonzero())
        rows.append(LayerSparsity(name, weight.numel(), kept, 8.0 * weight.dtype.itemsize))
    if not rows:
        raise ValueError("The model has no weights to count.")
    return Sparsity(tuple(rows))


def weight_name(layer: str, weight: str) -> str:
    """What a weight is called: like its layer, unless the layer has several."""
    if weight == "weight":
        return layer or "the model"
    return f"{layer}.{weight}" if layer else weight


def _weights(model: nn.Module) -> Iterator[tuple[str, Posterior | Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, Posterior):
            continue
        if isinstance(module, SparseLinear):
            yield name or "the model", module.weight
        for child_name, child in module.named_children():
            if isinstance(child, Posterior) and not child.layout.affine:
                yield weight_name(name, child_name), child
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                # torch.nn.utils.prune keeps weight_orig and weight_mask, of which weight is made.
                plain_name = parameter_name.removesuffix("_orig")
                weight = getattr(module, plain_name, parameter)
                yield weight_name(name, plain_name), weight
