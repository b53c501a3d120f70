"""Networks of dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zeromean.arguments import require_integer, shown
from zeromean.models.parts import LayerFactory, _sequential


def mlp(
    widths: Sequence[int],
    layer: LayerFactory | Sequence[LayerFactory] = nn.Linear,
    *,
    activation: LayerFactory = nn.ReLU,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Dense layers `dense1`, `dense2`, … with a nonlinearity between two; inputs are flattened.

    Args:
        widths: Sizes of the input, of the hidden layers and of the output.
        layer: Factory of every layer, or one for each.
        activation: Factory of the nonlinearity.
        dropout: Drop rate before every layer but the first.
    """
    if isinstance(widths, str) or not isinstance(widths, Sequence):
        raise TypeError(f"widths must be a list of sizes, got {shown(widths)}.")
    widths = [require_integer("a size in widths", width, at_least=1) for width in widths]
    if len(widths) < 2:
        raise ValueError(f"widths needs the sizes of input and output, got {tuple(widths)}.")
    num_layers = len(widths) - 1
    factories = list(layer) if isinstance(layer, Sequence) else [layer] * num_layers
    if len(factories) != num_layers:
        raise ValueError(
            f"layer needs one factory, or one for each of {num_layers} layers, "
            f"got {len(factories)}."
        )
    parts: dict[str, nn.Module | None] = {"flatten": nn.Flatten()}
    for number, factory in enumerate(factories, start=1):
        if number > 1:
            parts[f"activation{number - 1}"] = activation()
            parts[f"dropout{number}"] = nn.Dropout(dropout) if dropout else None
        parts[f"dense{number}"] = factory(widths[number - 1], widths[number])
    return _sequential(parts)
