"""Files that 0.1.0 wrote still load, and hold what they held then."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean import export

FOLDER = Path(__file__).parents[1] / "fixtures"
INPUT = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)
SEQUENCE = torch.linspace(-1, 1, 2 * 3 * 5).view(2, 3, 5)


class SavedNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.gru = nn.GRU(6, 4, batch_first=True)
        self.last = nn.Linear(4, 3)

    def states(self, x):
        return self.gru(self.first(x).relu())[0]

    def forward(self, x):
        return self.last(self.states(x))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.gru = nn.GRU(12, 6, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x).relu()
        states, _ = self.gru(x + x.mean(dim=1, keepdim=True))
        return {"logits": self.last(states[:, -1])}["logits"]


def plain_network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 40),
        nn.BatchNorm1d(40),
        nn.ReLU(),
        nn.Linear(40, 30),
        nn.ReLU(),
        nn.Linear(30, 3),
    )


@pytest.fixture(scope="module")
def expected():
    content = json.loads((FOLDER / "expected.json").read_text())
    return {name: torch.tensor(values) for name, values in content.items()}


def test_saved_network_of_0_1_0_loads(expected):
    model = zm.load(FOLDER / "saved.safetensors", SavedNetwork()).eval()
    with torch.no_grad(), zm.sampling(model, zm.mean):
        torch.testing.assert_close(model.states(SEQUENCE), expected["saved_states"])
    assert torch.equal(model.last.weight.scale, expected["saved_scale"])
    assert isinstance(model.gru, zm.GRU)
    assert model.first.prior == zm.Normal(scale=0.5)
    assert int(model.first.weight.mask.sum()) == 18
    assert model.last.weight.noise is zm.rademacher
    assert model.last.sampler is zm.weight
    assert model.last.prior is None


@pytest.mark.parametrize(("name", "inputs"), [("compressed", INPUT), ("graph", SEQUENCE)])
def test_compressed_network_of_0_1_0_loads(name, inputs, expected):
    model = export.load_compressed(FOLDER / f"{name}.safetensors")
    torch.testing.assert_close(model(inputs), expected[name])
