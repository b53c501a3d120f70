"""LeNets, as the papers had them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from zeromean.models.dense import mlp
from zeromean.models.parts import LayerFactory, _sequential


def lenet5(
    *,
    conv1: LayerFactory = nn.Conv2d,
    conv2: LayerFactory = nn.Conv2d,
    dense1: LayerFactory = nn.Linear,
    dense2: LayerFactory = nn.Linear,
    batchnorm: bool | Collection[str] = True,
    bias: bool = True,
    activation: LayerFactory = nn.ReLU,
    dropout: float = 0.0,
    num_classes: int = 10,
) -> nn.Sequential:
    """LeNet-5 as the authors of variance networks ran it: `(N, 1, 28, 28)` to logits.

    Args:
        conv1: Factory of this layer; `conv2`, `dense1` and `dense2` are those of the others.
        batchnorm: BatchNorm after every layer but the last. The layers then have no biases, the
            last one included. Or the names of the layers that have it, in place of a bias: the
            authors' network with four stochastic layers has `("dense1",)`.
        bias: False for no additive terms: with BatchNorm it loses its affine map (the networks of
            Table 3, with `activation=nn.Tanh`), without it the layers lose their biases.
        activation: Factory of the nonlinearity.
        dropout: Drop rate before `dense1`; the authors' baseline has 0.5.
        num_classes: Number of logits.
    """
    hidden = ("conv1", "conv2", "dense1")
    if isinstance(batchnorm, bool):
        normed = (*hidden, "dense2") if batchnorm else ()
    else:
        normed = tuple(batchnorm)
        if isinstance(batchnorm, str) or not set(normed) <= set(hidden):
            raise ValueError(f"batchnorm must be a bool or some of {hidden}, got {batchnorm!r}.")

    def biased(name: str) -> bool:
        return bias and name not in normed

    return _sequential(
        {
            "conv1": conv1(1, 20, 5, bias=biased("conv1")),
            "norm1": nn.BatchNorm2d(20, affine=bias) if "conv1" in normed else None,
            "activation1": activation(),
            "pool1": nn.MaxPool2d(2),
            "conv2": conv2(20, 50, 5, bias=biased("conv2")),
            "norm2": nn.BatchNorm2d(50, affine=bias) if "conv2" in normed else None,
            "activation2": activation(),
            "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(),  # (N, 50 · 4 · 4)
            "dropout": nn.Dropout(dropout) if dropout else None,
            "dense1": dense1(800, 500, bias=biased("dense1")),
            "norm3": nn.BatchNorm1d(500, affine=bias) if "dense1" in normed else None,
            "activation3": activation(),
            "dense2": dense2(500, num_classes, bias=biased("dense2")),
        }
    )


def lenet5_caffe(
    *,
    conv1: LayerFactory = nn.Conv2d,
    conv2: LayerFactory = nn.Conv2d,
    dense1: LayerFactory = nn.Linear,
    dense2: LayerFactory = nn.Linear,
    activation: LayerFactory = nn.ReLU,
    conv_activation: LayerFactory | None = None,
    num_classes: int = 10,
) -> nn.Sequential:
    """LeNet-5 as Caffe ships it: biases, no BatchNorm; `(N, 1, 28, 28)` to logits.

    Caffe has no nonlinearity between a convolution and its pooling; `conv_activation` adds one.
    """
    return _sequential(
        {
            "conv1": conv1(1, 20, 5),
            "activation1": conv_activation() if conv_activation else None,
            "pool1": nn.MaxPool2d(2),
            "conv2": conv2(20, 50, 5),
            "activation2": conv_activation() if conv_activation else None,
            "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(),
            "dense1": dense1(800, 500),
            "activation3": activation(),
            "dense2": dense2(500, num_classes),
        }
    )


def lenet_300_100(
    *,
    dense1: LayerFactory = nn.Linear,
    dense2: LayerFactory = nn.Linear,
    dense3: LayerFactory = nn.Linear,
    activation: LayerFactory = nn.ReLU,
    num_classes: int = 10,
) -> nn.Sequential:
    """Two hidden layers of 300 and 100: `(N, 1, 28, 28)` to logits."""
    layers = (dense1, dense2, dense3)
    return mlp((784, 300, 100, num_classes), layers, activation=activation)
