"""The networks of the papers, as functions that return plain modules with named layers.

Every layer comes from a factory that is called like torch's, so that a stochastic network is the
same function with other arguments: `lenet5(dense1=zm.Linear)`, or
`lenet5(dense1=partial(zm.Linear, posterior=zm.Additive))`. Layers are attributes: `model.dense1`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn

from zeromean.arguments import require_integer, require_numbers, shown
from zeromean.layers import Linear

LayerFactory = Callable[..., nn.Module]

VGG_GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


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
        conv1, conv2, dense1, dense2: Factories of the four layers.
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


def vgg_like(
    width: float = 1.0,
    num_classes: int = 10,
    *,
    conv: LayerFactory = nn.Conv2d,
    dense1: LayerFactory = nn.Linear,
    dense2: LayerFactory = nn.Linear,
    dropout: bool = True,
    **convs: LayerFactory,
) -> nn.Sequential:
    """The VGG-like network for CIFAR as the authors ran it: `(N, 3, 32, 32)` to logits.

    13 convolutions in five groups, each convolution with BatchNorm (and so without a bias). Their
    variance network is `vgg_like(conv11=c, conv12=c, conv13=c, dense1=d)`.

    Args:
        width: Factor of all hidden widths.
        num_classes: Number of logits.
        conv: Factory of the convolutions that have none of their own.
        dense1, dense2: Factories of the dense layers.
        dropout: Dropout within the first four groups (0.3 in the first, then 0.4) and before each
            dense layer (0.5); the last group has none.
        convs: Factories of single convolutions, by name: `conv1` to `conv13`.
    """
    require_numbers(width=width)
    if not 0 < width < math.inf:
        raise ValueError(f"width must be positive, got {width}.")
    if not isinstance(dropout, bool):
        raise TypeError(f"dropout must be True, for the rates below, or False, got {dropout!r}.")
    num_convs = sum(map(len, VGG_GROUPS))
    names = [f"conv{number}" for number in range(1, num_convs + 1)]
    unknown = [name for name in convs if name not in names]
    if unknown:
        raise TypeError(
            f"vgg_like has no layer {unknown[0]!r}; its convolutions are conv1 to conv{num_convs}."
        )
    parts: dict[str, nn.Module | None] = {}
    channels, number = 3, 0
    for group, group_sizes in enumerate(VGG_GROUPS, start=1):
        drop_rate = {1: 0.3, 5: 0.0}.get(group, 0.4) if dropout else 0.0
        for place, size in enumerate(group_sizes, start=1):
            number += 1
            out_channels = _scaled(size, width)
            factory = convs.get(f"conv{number}", conv)
            parts[f"conv{number}"] = factory(channels, out_channels, 3, padding=1, bias=False)
            parts[f"norm{number}"] = nn.BatchNorm2d(out_channels)
            parts[f"activation{number}"] = nn.ReLU()
            inside = place < len(group_sizes)
            parts[f"dropout{number}"] = nn.Dropout(drop_rate) if drop_rate and inside else None
            channels = out_channels
        parts[f"pool{group}"] = nn.MaxPool2d(2)
    hidden = _scaled(512, width)
    parts["flatten"] = nn.Flatten()  # one pixel is left
    parts["dropout_dense1"] = nn.Dropout(0.5) if dropout else None
    parts["dense1"] = dense1(channels, hidden, bias=False)
    parts["norm_dense1"] = nn.BatchNorm1d(hidden)
    parts["activation_dense1"] = nn.ReLU()
    parts["dropout_dense2"] = nn.Dropout(0.5) if dropout else None
    parts["dense2"] = dense2(hidden, num_classes)
    return _sequential(parts)


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


def _sequential(parts: Mapping[str, nn.Module | None]) -> nn.Sequential:
    """The parts in their order, under their names; None stands for a part left out."""
    return nn.Sequential(
        OrderedDict((name, part) for name, part in parts.items() if part is not None)
    )


def _scaled(size: int, width: float) -> int:
    return max(1, round(size * width))
