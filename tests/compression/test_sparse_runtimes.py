"""What is said of unstructured sparsity before anything is trained, against what is built then."""

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean import export
from zeromean.compression.modules.sparse_layers import SparseConv2d, SparseLinear


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(8 * 36, 100),
        nn.ReLU(),
        nn.Linear(100, 3),
    )


def test_the_sentence_names_every_runtime():
    found = zm.sparse_runtimes(network())
    total = 72 + 72 + 28_800 + 300
    assert found.layers == ("0", "4")
    assert found.torch == pytest.approx((72 + 28_800) / total)
    assert found.torch_compile == pytest.approx(28_800 / total)
    assert found.onnxruntime == 0
    text = str(found)
    assert text.endswith(".")
    assert ". " not in text
    assert all(name in text for name in ("torch can", "torch.compile in 98%", "onnxruntime"))
    assert "(0, 4)" in text


def test_compress_multiplies_those_layers_sparsely_and_no_others():
    """All weights are as sparse as training could make them."""
    model = network()
    zm.make_stochastic_(model, posterior=zm.Additive)
    assert zm.sparse_runtimes(model) == zm.sparse_runtimes(network())
    expected = zm.sparse_runtimes(model).layers
    torch.manual_seed(0)
    *sparse_layers, _ = zm.stochastic_layers(model).values()
    for layer in sparse_layers:
        kept = torch.rand(layer.weight.shape) < 0.05
        kept.view(len(kept), -1)[:, 0] = True  # No unit is gone.
        layer.weight.mask = kept
    small = zm.compress(model, torch.rand(2, 1, 8, 8))
    sparse = [n for n, m in small.named_modules() if isinstance(m, (SparseLinear, SparseConv2d))]
    assert [name.rpartition(".")[2] for name in sparse] == list(expected)


def test_the_onnx_file_holds_the_zeros(tmp_path):
    model = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 3))
    dense = export.save_onnx(model, tmp_path / "dense.onnx", torch.rand(2, 100)).size
    with torch.no_grad():
        model[0].weight.mul_(torch.rand(64, 100) < 0.02)
    sparse = export.save_onnx(model, tmp_path / "sparse.onnx", torch.rand(2, 100)).size
    assert sparse > 0.99 * dense


def test_where_nothing_can_be_skipped_that_is_said():
    found = zm.sparse_runtimes(nn.LSTM(8, 100))
    assert found.layers == ()
    assert "in no layer of this network, nor does torch.compile" in str(found)
    with pytest.raises(ValueError, match="no weights that could become sparse"):
        zm.sparse_runtimes(nn.ReLU())
