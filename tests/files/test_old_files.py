"""Files that 0.1.0 wrote still load, and hold what they held then."""

import json

import pytest
import torch

import zeromean as zm
from old_networks import FOLDER, SavedNetwork
from zeromean import export

INPUT = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)
SEQUENCE = torch.linspace(-1, 1, 2 * 3 * 5).view(2, 3, 5)


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
