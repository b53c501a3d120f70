"""Residual networks for CIFAR."""

from __future__ import annotations

from torch import Tensor, nn

from zeromean.arguments import require_integer
from zeromean.models.parts import LayerFactory, _sequential, require_layers, scaled

RESNET_GROUPS = (16, 32, 64)


class ResidualBlock(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), and a projection of x where shapes differ."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int,
        conv1: LayerFactory,
        conv2: LayerFactory,
        shortcut: LayerFactory,
    ):
        super().__init__()
        options = {"padding": 1, "bias": False}
        self.conv1 = conv1(in_channels, out_channels, 3, stride=stride, **options)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.activation1 = nn.ReLU()
        self.conv2 = conv2(out_channels, out_channels, 3, **options)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = _sequential(
                {
                    # Every other pixel. A convolution of one pixel with a stride is the same, but
                    # of 4 channels in channels_last its gradient crashes (torch 2.13, oneDNN).
                    "subsample": nn.MaxPool2d(1, stride) if stride > 1 else None,
                    "conv": shortcut(in_channels, out_channels, 1, bias=False),
                    "norm": nn.BatchNorm2d(out_channels),
                }
            )
        self.activation2 = nn.ReLU()

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.activation1(self.norm1(self.conv1(input)))
        return self.activation2(self.norm2(self.conv2(hidden)) + self.shortcut(input))


def resnet(
    depth: int = 20,
    width: float = 1.0,
    num_classes: int = 10,
    *,
    conv: LayerFactory = nn.Conv2d,
    dense: LayerFactory = nn.Linear,
    **convs: LayerFactory,
) -> nn.Sequential:
    """The residual network for CIFAR of He et al. (2016): `(N, 3, 32, 32)` to logits.

    A convolution and three groups of blocks with two convolutions each, 16, 32 and 64 channels
    wide. Where a group begins with fewer pixels and more channels, the input is projected by a
    convolution (their option B). Every convolution has BatchNorm, and so no bias.

    Args:
        depth: Layers with weights, projections not counted: 6n + 2 (8, 14, 20, 32, …).
        width: Factor of all hidden widths.
        num_classes: Number of logits.
        conv: Factory of the convolutions that have none of their own, projections included.
        dense: Factory of the last layer.
        convs: Factories of single convolutions, by number: `conv1`, the first one of all, to
            `conv19` of 20 layers. A projection is made as the convolution next to it.
    """
    blocks, rest = divmod(require_integer("depth", depth, at_least=8) - 2, 6)
    if rest:
        raise ValueError(f"depth must be 6n + 2, as in 8, 14, 20 or 32, got {depth}.")
    names = [f"conv{number}" for number in range(1, depth)]
    require_layers("resnet", names, convs, f"its convolutions are conv1 to conv{depth - 1}")
    factories = iter(convs.get(name, conv) for name in names)
    channels, *_ = groups = scaled(RESNET_GROUPS, width)
    parts: dict[str, nn.Module | None] = {
        "conv1": next(factories)(3, channels, 3, padding=1, bias=False),
        "norm1": nn.BatchNorm2d(channels),
        "activation1": nn.ReLU(),
    }
    for group, out_channels in enumerate(groups, start=1):
        for block in range(1, blocks + 1):
            first = next(factories)
            parts[f"block{group}_{block}"] = ResidualBlock(
                channels,
                out_channels,
                stride=2 if block == 1 < group else 1,
                conv1=first,
                conv2=next(factories),
                shortcut=first,
            )
            channels = out_channels
    parts["pool"] = nn.AdaptiveAvgPool2d(1)
    parts["flatten"] = nn.Flatten()
    parts["dense"] = dense(channels, num_classes)
    return _sequential(parts)
