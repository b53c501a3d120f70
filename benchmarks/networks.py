"""The networks we measure, each a function of how its layers are made.

A factory is called as `conv(in_channels, out_channels, kernel_size, padding=...)` and
`linear(in_features, out_features)`, so one definition serves `torch.nn` and every peer.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

LayerFactory = Callable[..., nn.Module]
Network = Callable[[LayerFactory, LayerFactory], nn.Module]


def lenet5_caffe(conv: LayerFactory, linear: LayerFactory) -> nn.Module:
    """431,080 parameters; the layers are named, so that one of them can be replaced."""
    return nn.Sequential(
        OrderedDict(
            conv1=conv(1, 20, 5, padding=0),
            pool1=nn.MaxPool2d(2),
            conv2=conv(20, 50, 5, padding=0),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            dense1=linear(800, 500),
            relu=nn.ReLU(),
            dense2=linear(500, 10),
        )
    )


def mlp(conv: LayerFactory, linear: LayerFactory) -> nn.Module:
    """784-1000-1000-10."""
    return _dense_stack(linear, [784, 1000, 1000, 10])


def deep_mlp(depth: int) -> Network:
    """784-200-...-200-10 with `depth` hidden layers."""

    def network(conv: LayerFactory, linear: LayerFactory) -> nn.Module:
        return _dense_stack(linear, [784] + depth * [200] + [10])

    return network


def narrow_vgg(conv: LayerFactory, linear: LayerFactory) -> nn.Module:
    """A VGG for 32 x 32 images, narrow enough for one pass of a batch of 128 in about 100 ms.

    There is no BatchNorm: some peers draw noise in training mode only, where BatchNorm would
    update its statistics during prediction.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width in [20, 40, 80]:
        layers += [conv(channels, width, 3, padding=1), nn.ReLU()]
        layers += [conv(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), linear(80 * 16, 128), nn.ReLU(), linear(128, 10))


def random_batch(network: Network, batch_size: int) -> tuple[Tensor, Tensor]:
    """Random images and labels: what is measured does not depend on their values."""
    shape = {lenet5_caffe: (1, 28, 28), narrow_vgg: (3, 32, 32)}.get(network, (784,))
    return torch.rand(batch_size, *shape), torch.randint(0, 10, (batch_size,))


def _dense_stack(linear: LayerFactory, widths: list[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths[:-1]):
        layers += [linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, linear(widths[-2], widths[-1]))
