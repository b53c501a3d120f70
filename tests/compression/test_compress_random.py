"""Random networks, each compressed and compared with itself in double precision."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean import export


class RandomNetwork(nn.Module):
    """A random graph of layers and functions on images, with a random way to a few outputs."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)
        self.layers = nn.ModuleList()
        self.steps = []  # a function or the number of a layer, and what it is applied to
        self.shapes = [(3, 8, 8)]
        self._add_layer(nn.Conv2d(3, self._width(), 3, padding=1), 0)
        self.activation = len(self.layers)  # One for many places.
        self.layers.append(nn.ReLU())
        for _ in range(self.random.randint(3, 9)):
            self._grow()
        features = self._leave()
        if self.random.random() < 0.7:
            self._add_layer(nn.Linear(features, 16), -1)
            if self.random.random() < 0.7:
                self._add_layer(nn.BatchNorm1d(16), -1)
            self._add(self.activation, -1)
            features = 16
        self._add_layer(nn.Linear(features, 4), -1)

    def forward(self, x):
        activations = [x]
        for step, places in self.steps:
            function = self.layers[step] if isinstance(step, int) else step
            activations.append(function(*(activations[place] for place in places)))
        return activations[-1]

    def _grow(self):
        """One more image, from one of the last."""
        place = self.random.randrange(max(1, len(self.shapes) - 4), len(self.shapes))
        channels, size, _ = self.shapes[place]
        alike = [i for i, s in enumerate(self.shapes) if i and s == self.shapes[place]]
        joinable = [i for i, s in enumerate(self.shapes) if i != place and i and s[1] == size]
        doubled = (channels, 2 * size, 2 * size)
        layers = [
            nn.Conv2d(channels, self._width(), 3, padding=1, bias=self.random.random() < 0.7),
            nn.Conv2d(channels, self._width(), 3 if size > 3 else 1),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, groups=channels),
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
            nn.Conv2d(channels, channels, 1, groups=2),
            nn.BatchNorm2d(channels),
            nn.MaxPool2d(2) if size > 3 else nn.PReLU(),
            nn.AvgPool2d(3, 1, 1),
            nn.ConvTranspose2d(channels, 4, 2, 2) if size < 8 else nn.ELU(),
        ]
        functions = [
            (torch.relu, [place], None),
            (self.activation, [place], None),
            (lambda x: 0.5 * x + 0.1, [place], None),
            (lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), [place], None),
            (torch.add, [place, self.random.choice(alike)], None),
            (torch.mul, [place, self.random.choice(alike)], None),
        ]
        if size < 8:
            functions.append((lambda x: F.interpolate(x, scale_factor=2.0), [place], doubled))
        if joinable:
            other = self.random.choice(joinable)
            together = (channels + self.shapes[other][0], size, size)
            functions.append((lambda *x: torch.cat(x, 1), [place, other], together))
        if self.random.random() < 0.6:
            self._add_layer(self.random.choice(layers), place)
        else:
            function, places, shape = self.random.choice(functions)
            self._add(function, *places, shape=shape or self.shapes[place])

    def _leave(self):
        """From the last image to `(N, features)`."""
        channels, size, _ = self.shapes[-1]
        features = channels * size**2
        ways = [
            (lambda x: x.flatten(1), features),
            (lambda x: x.view(x.size(0), -1), features),
            (lambda x: x.reshape(-1, features), features),
            (lambda x: x.mean((2, 3)), channels),
            (lambda x: x.amax((-2, -1)), channels),
            (lambda x: x[:, :, 0, -1], channels),
            (lambda x: x.flatten(2).transpose(1, 2).flatten(1), features),
        ]
        if self.random.random() < 0.4:
            return self._leave_by_recurrence(channels)
        way, features = self.random.choice(ways)
        self._add(way, -1, shape=(features,))
        return features

    def _leave_by_recurrence(self, channels):
        kind, depth = self.random.choice([nn.LSTM, nn.GRU]), self.random.choice([1, 2])
        both = self.random.random() < 0.5
        self.layers.append(kind(channels, 7, depth, batch_first=True, bidirectional=both))
        ways = [
            (lambda x: x.flatten(2).transpose(1, 2), lambda states: states[0][:, -1]),
            (lambda x: x.mean(3).permute(0, 2, 1), lambda states: states[0].mean(1)),
        ]
        enter, leave = self.random.choice(ways)
        for step in (enter, len(self.layers) - 1, leave):
            self._add(step, -1, shape=(14 if both else 7,))
        return 14 if both else 7

    def _width(self):
        return self.random.choice([4, 6, 8])

    def _add_layer(self, layer, place):
        self.layers.append(layer)
        with torch.no_grad():
            shape = layer.eval()(torch.zeros(2, *self.shapes[place])).shape[1:]
        self._add(len(self.layers) - 1, place, shape=tuple(shape))

    def _add(self, step, *places, shape=None):
        places = [place % len(self.shapes) for place in places]
        self.steps.append((step, places))
        self.shapes.append(shape or self.shapes[places[0]])


def zero_out_(model):
    """Zeros in weights, whole units, biases and the multipliers of BatchNorm."""
    part, dead = model.random.choice([0.5, 0.8, 0.95]), model.random.choice([0.1, 0.4, 0.7])
    for layer in model.layers:
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
            layer.weight.normal_().mul_(torch.rand_like(layer.weight) > 0.2)
            layer.bias.normal_()
            continue
        for parameter in layer.parameters():
            parameter *= torch.rand_like(parameter) > (part if parameter.dim() > 1 else 0.4)
            if parameter.dim() > 1 and not isinstance(layer, nn.RNNBase):
                units = parameter.transpose(0, 1) if getattr(layer, "transposed", 0) else parameter
                units[torch.rand(len(units)) < dead] = 0


@pytest.mark.parametrize("seed", range(40))
def test_random_networks_predict_the_same(seed, tmp_path):
    torch.manual_seed(seed)
    model = RandomNetwork(seed).double().eval()
    with torch.no_grad():
        zero_out_(model)
    x = torch.randn(12, 3, 8, 8, dtype=torch.float64)
    compressed = zm.compress(model, x[:2] if seed % 2 else None)
    for batch in (1, 3, 12):
        expected = model(x[:batch])
        scale = 1 + expected.abs().max()
        torch.testing.assert_close(
            compressed(x[:batch]) / scale, expected / scale, rtol=0, atol=1e-9
        )
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    assert torch.equal(export.load_compressed(tmp_path / "m.safetensors")(x), compressed(x))
