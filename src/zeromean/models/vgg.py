"""The VGG-like network for CIFAR."""

from __future__ import annotations

from torch import nn

from zeromean.models.parts import LayerFactory, _sequential, require_layers, scaled

VGG_GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


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
        dense1: Factory of the first dense layer, and `dense2` of the last one.
        dropout: Dropout within the first four groups (0.3 in the first, then 0.4) and before each
            dense layer (0.5); the last group has none.
        convs: Factories of single convolutions, by name: `conv1` to `conv13`.
    """
    if not isinstance(dropout, bool):
        raise TypeError(f"dropout must be True, for the rates below, or False, got {dropout!r}.")
    num_convs = sum(map(len, VGG_GROUPS))
    names = [f"conv{number}" for number in range(1, num_convs + 1)]
    require_layers("vgg_like", names, convs, f"its convolutions are conv1 to conv{num_convs}")
    groups = [scaled(sizes, width) for sizes in VGG_GROUPS]
    parts: dict[str, nn.Module | None] = {}
    channels, number = 3, 0
    for group, group_sizes in enumerate(groups, start=1):
        drop_rate = {1: 0.3, 5: 0.0}.get(group, 0.4) if dropout else 0.0
        for place, out_channels in enumerate(group_sizes, start=1):
            number += 1
            factory = convs.get(f"conv{number}", conv)
            parts[f"conv{number}"] = factory(channels, out_channels, 3, padding=1, bias=False)
            parts[f"norm{number}"] = nn.BatchNorm2d(out_channels)
            parts[f"activation{number}"] = nn.ReLU()
            inside = place < len(group_sizes)
            parts[f"dropout{number}"] = nn.Dropout(drop_rate) if drop_rate and inside else None
            channels = out_channels
        parts[f"pool{group}"] = nn.MaxPool2d(2)
    (hidden,) = scaled([512], width)
    parts["flatten"] = nn.Flatten()  # one pixel is left
    parts["dropout_dense1"] = nn.Dropout(0.5) if dropout else None
    parts["dense1"] = dense1(channels, hidden, bias=False)
    parts["norm_dense1"] = nn.BatchNorm1d(hidden)
    parts["activation_dense1"] = nn.ReLU()
    parts["dropout_dense2"] = nn.Dropout(0.5) if dropout else None
    parts["dense2"] = dense2(hidden, num_classes)
    return _sequential(parts)
