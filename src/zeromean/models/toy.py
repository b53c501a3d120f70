"""The network of Figure 1."""

from __future__ import annotations

from torch import nn

from zeromean.layers.linear import Linear
from zeromean.models.parts import LayerFactory, _sequential


def toy_network(bottleneck: LayerFactory = Linear) -> nn.Sequential:
    """Figure 1: `encoder` takes points `(N, 2)` to two variance neurons, `classifier` reads them.

    Six dense layers, the fifth (`encoder.bottleneck`) with two outputs, and a linear classifier,
    which the paper's "six" leaves out.
    """
    encoder: dict[str, nn.Module | None] = {}
    for number in range(1, 5):
        encoder[f"dense{number}"] = nn.Linear(2 if number == 1 else 100, 100)
        encoder[f"activation{number}"] = nn.LeakyReLU()
    encoder["bottleneck"] = bottleneck(100, 2, bias=False)
    classifier = {
        "activation1": nn.LeakyReLU(),
        "dense1": nn.Linear(2, 100),
        "activation2": nn.LeakyReLU(),
        "dense2": nn.Linear(100, 4),
    }
    return _sequential({"encoder": _sequential(encoder), "classifier": _sequential(classifier)})
