"""The report on a compression: shapes, bytes and reasons."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from test_compress import network, zero_out
from torch import nn

import zeromean as zm
from zeromean import export
from zeromean.models.lenet import lenet5_caffe


def tensor_bytes(path):
    """Bytes of all tensors in a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118, RUF100


def test_report_names_every_layer_with_its_units_bytes_and_fate(tmp_path):
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 300),
        nn.BatchNorm1d(300),
        nn.ReLU(),
        nn.Linear(300, 40),
        nn.LayerNorm(40),
        nn.Linear(40, 10),
    ).eval()
    with torch.no_grad():
        model[1].weight[100:] = 0
        model[1].weight *= torch.rand_like(model[1].weight) < 0.02
        model[1].weight[:, 0] = 1.0
        model[1].weight[100:] = 0
    compressed = zm.compress(model)
    report = zm.compression_report(model, compressed)
    assert [row.name for row in report.layers] == ["1", "2", "4", "5", "6"]
    first, norm, second, layer_norm, last = report.layers
    assert (first.before, first.after) == ((784, 300), (784, 100))
    assert (first.storage, first.note) == ("sparse", "200 of 300 units gone")
    weight = model[1].weight[:100]
    assert first.left == pytest.approx(int(weight.count_nonzero()) / weight.numel())
    assert first.size_before == 4 * (784 * 300 + 300)
    assert (norm.before, norm.after, norm.note) == ((300,), None, "in the weights of 1")
    assert (norm.size_before, norm.size_after) == (4 * 4 * 300 + 8, 0)
    assert (second.after, second.storage, second.left) == ((100, 40), "dense", 1.0)
    assert second.note == "all read by 5 (LayerNorm)"
    assert (layer_norm.before, layer_norm.after) == ((40,), (40,))
    assert layer_norm.note == "LayerNorm stays as it is"
    assert last.note == "all read by the output"
    assert report["6"] is last
    with pytest.raises(KeyError, match="dense"):
        report["dense"]

    saved = export.save_compressed(compressed, tmp_path / "m.safetensors", original=model)
    assert report.size == tensor_bytes(saved.path) == sum(row.size_after for row in report.layers)
    assert report.original_size == saved.original_size
    assert report.compression == report.original_size / report.size
    lines = str(report).splitlines()
    assert len({line.index("dense") for line in lines if " dense " in line}) == 1
    assert lines[1].split()[:4] == ["1", "784", "→", "300"]
    assert lines[-1].startswith(f"{report.original_size:,} bytes become {report.size:,}, ")
    assert not report.replanned
    of_loaded = zm.compression_report(model, export.load_compressed(saved.path))
    assert of_loaded == replace(report, replanned=True)
    assert str(of_loaded).splitlines()[-2] == (
        "The network carries no plan of its own: the notes are of compressing the model again."
    )


def test_report_says_why_layers_stay():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(6, 8)
            self.again = nn.Linear(8, 8)
            self.hooked = nn.Linear(8, 8)
            self.hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
            self.grouped = nn.Conv1d(8, 8, 1, groups=2)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.spare = nn.Linear(3, 3)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            x = self.again(self.again(self.enter(x)).cumsum(1))
            x = self.grouped(self.hooked(x).transpose(1, 2)).transpose(1, 2)
            return self.head(self.attention(x, x, x)[0])

    model = zero_out(Opaque(), 0.5)
    compressed = zm.compress(model)
    report = zm.compression_report(model, compressed)
    notes = {row.name: row.note for row in report.layers}
    assert notes == {
        "enter": "all read by again (Linear)",
        "again": "it is called more than once",
        "hooked": "it has hooks",
        "grouped": "a convolution of groups keeps its units",
        "attention": "it is called with more than one argument",
        "attention.out_proj": "it is called with more than one argument",
        "spare": "never called",
        "head": "all read by the output",
    }
    assert report["spare"].after is None
    model = network(lambda self, x: self.dense(x).sort(-1).values, dense=nn.Linear(3, 3))
    model.dense.weight.data[0] = 0
    report = zm.compression_report(model, zm.compress(model))
    assert report["dense"].note == "all read by sort()"


def test_report_of_stochastic_layers_counts_one_number_a_weight():
    model = nn.Sequential(
        zm.Linear(6, 20, posterior=zm.Additive),
        nn.ReLU(),
        zm.LogNormalDropout(20),
        zm.Linear(20, 10),
        nn.Linear(10, 3),
    )
    model[2].keep[:15] = False
    zm.prune_(model, sparsity=0.5, where=lambda name, _: name == "0")
    report = zm.compression_report(model, zm.compress(model))
    assert report["0"].size_before == 4 * (6 * 20 + 20)
    assert report["0"].after[1] <= 5
    assert report["2"].note == "in the weights of 0"
    assert report["3"].storage == "random"
    assert report["3"].before == (20, 10)


@pytest.mark.parametrize("layer", [nn.Linear(90, 80), zm.Linear(90, 80, posterior=zm.Additive)])
def test_report_of_a_single_layer(layer):
    if isinstance(layer, nn.Linear):
        zero_out(layer, 0.97, dead=0)
    else:
        zm.prune_(layer, sparsity=0.97)
    (row,) = zm.compression_report(layer, zm.compress(layer)).layers
    assert (row.name, row.storage) == ("the model", "sparse")


def test_report_of_what_cannot_be_traced():
    model = network(
        lambda self, x: self.dense2(self.dense1(x) if x.sum() > 0 else self.dense1(-x)),
        dense1=nn.Linear(100, 80),
        dense2=nn.Linear(80, 3),
    )
    zero_out(model, 0.97)
    with pytest.warns(UserWarning, match="cannot trace the model"):
        compressed = zm.compress(model)
    report = zm.compression_report(model, compressed)
    assert report["dense1"].storage == "sparse"
    assert report["dense1"].after == (100, 80)
    assert "No units are removed: torch.fx cannot trace the model (" in str(report)


def test_report_refuses_another_network(tmp_path):
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)]
    model = zero_out(nn.Sequential(*layers), 0.5)
    steps = torch.randn(2, 6, 5)
    compressed = zm.compress(model, steps)
    report = zm.compression_report(model, compressed, steps)
    assert report["1"].after == (6,)
    assert zm.compression_report(model, compressed) == report  # The network carries its plan.
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    loaded = export.load_compressed(tmp_path / "m.safetensors")
    assert zm.compression_report(model, loaded, steps) == replace(report, replanned=True)
    with pytest.raises(ValueError, match=r"has a layer 1, .* and the example_inputs that it got"):
        zm.compression_report(model, loaded)
    with pytest.raises(ValueError, match=r"does not run on example_inputs \(.*pass what model"):
        zm.compression_report(model, loaded, torch.randn(2, 9))
    model = zero_out(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), 0.5)
    other = network(lambda self, x: self.dense(x), dense=nn.Linear(6, 3))
    compressed = zm.compress(zero_out(nn.Sequential(nn.Flatten(), *other.children()), 0.5))
    for wrong in (compressed, compressed[1]):
        with pytest.raises(ValueError, match=r"has no layer \d, which does not go with \d"):
            zm.compression_report(model, wrong)


def test_report_of_parameters_outside_of_layers(tmp_path):
    model = network(
        lambda self, x: self.dense2(torch.relu(self.dense1(x + self.position)) * self.block.gamma),
        dense1=nn.Linear(8, 16),
        block=nn.ParameterDict({"gamma": torch.rand(16), "unread": torch.rand(3)}),
        dense2=nn.Linear(16, 3),
    )
    model.position = nn.Parameter(torch.randn(1, 5, 8))
    zero_out(model, 0.6)
    x = torch.randn(2, 5, 8)
    compressed = zm.compress(model, x)
    report = zm.compression_report(model, compressed, x)
    assert [row.name for row in report.layers][-3:] == ["position", "block.gamma", "block.unread"]
    assert report["position"].after == ()
    assert report["block.unread"].after is None
    assert report["block.unread"].note == "never read"
    assert sum(row.size_before for row in report.layers) == report.original_size
    assert sum(row.size_after for row in report.layers) <= report.size


def test_layers_are_timed_and_drawn(tmp_path):
    model = zero_out(lenet5_caffe(), 0.5, dead=0.5)
    x = torch.rand(8, 1, 28, 28)
    compressed = zm.compress(model, x)
    report = zm.compression_report(model, compressed, x, measure=True)
    for row in report.layers:
        assert row.ms_before > 0
        assert row.ms_after is None or row.ms_after > 0
    assert report.ms_before > max(row.ms_before for row in report.layers)
    assert "× faster" in str(report)
    largest = max(report.layers, key=lambda row: row.size_after).name
    assert report.limit.startswith(f"{largest} has ")
    assert "the units of dense2 are all read" in report.limit
    report.save_picture(tmp_path / "layers.png")
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    assert zm.compression_report(model, compressed).ms_before is None
    with pytest.raises(ValueError, match="times the models on example_inputs; pass a batch"):
        zm.compression_report(model, compressed, measure=True)
