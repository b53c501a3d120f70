"""Plain networks in few bits."""

import pytest
import torch
from torch import nn

from zeromean import export
from zeromean.compression.modules.sparse_layers import SparseLinear
from zeromean.compression.rounding import rounded


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 40),
        nn.ReLU(),
        nn.Linear(40, 3),
    ).requires_grad_(False)


@pytest.mark.parametrize("bits", [8, 5, 4])
def test_every_row_is_on_a_grid_of_so_many_bits(bits):
    model = network()
    found = rounded(model, bits)
    for ours, theirs in zip(found, model, strict=True):
        if not hasattr(theirs, "weight"):
            continue
        assert torch.equal(ours.bias, theirs.bias)
        rows, exact = ours.weight.flatten(1).double(), theirs.weight.flatten(1).double()
        step = exact.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        multiples = rows / step
        torch.testing.assert_close(multiples, multiples.round(), atol=1e-4, rtol=0)
        assert ((rows - exact).abs() <= step * 0.5001).all()


def test_files_have_the_bits(tmp_path):
    model = network()
    exact = export.save_compressed(model, tmp_path / "exact.safetensors").size
    small = rounded(model, 4)
    size = export.save_compressed(small, tmp_path / "small.safetensors").size
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert exact - size > 3.2 * weights  # Of 32 bits, 4 and a step for each row.
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(export.load_compressed(tmp_path / "small.safetensors")(x), small(x))


def test_sparse_layers_stay_sparse():
    torch.manual_seed(0)
    weight = torch.randn(30, 40) * (torch.rand(30, 40) < 0.1)
    model = nn.Sequential(SparseLinear(weight, torch.randn(30)), nn.LSTM(30, 4))
    found = rounded(model, 8)
    assert isinstance(found[0], SparseLinear)
    assert torch.equal(found[0].weight != 0, (weight.abs() > 0) & (found[0].weight != 0))
    torch.testing.assert_close(
        found[0].weight, weight, atol=float(weight.abs().max()) / 200, rtol=0
    )
    x = torch.randn(3, 40)
    torch.testing.assert_close(found(x)[0], model(x)[0], atol=0.05, rtol=0.05)
    assert torch.equal(model[0].weight, weight)
