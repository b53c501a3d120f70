"""Noise on units that a forward function knows nothing of."""

import copy
import pickle

import pytest
import torch
from test_compress import assert_same_predictions, network, num_units
from test_compress_architectures import NETWORKS
from test_export import in_onnxruntime
from torch import nn

import zeromean as zm
from zeromean import export
from zeromean.layers.dropout.input_noise import InputNoise, attach_, input_noises

# Of the layers that make units, which ones share them.
TOGETHER = {
    "vgg": [{"0"}, {"3"}, {"7"}, {"12"}],
    "resnet": [{"0", "3.conv2"}, {"3.conv1"}, {"4.conv1"}, {"4.downsample.0", "4.conv2"}],
    "mobile net": [{"features.0"}, {"features.6"}, {"features.12"}],
    "u-net": [{"down1.0", "join2.0"}, {"down2.0", "up2"}, {"middle.0"}, {"join1.0"}],
    "squeeze and excite": [{"enter", "conv", "excite"}, {"squeeze"}],
    "layer norm": [{"4"}],
    "embedding": [{"embedding"}, {"dense1"}],
    "temporal": [{"conv1"}, {"mix"}, {"conv2"}],
}


def random_statistics_(model):
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval()


def drown_(model, share=0.6):
    """Let noise drown some of the units, and the others have means other than 1."""
    for module in model.modules():
        if isinstance(module, zm.LogNormalDropout):
            module.location.data.uniform_(-0.5, 0.0)
            drowned = torch.rand(module.num_features) < share
            drowned[0], drowned[-1] = True, False
            module.log_scale.data[drowned] = 4.0
    zm.prune_(model)


def noisy(name):
    build, batch = NETWORKS[name]
    model = random_statistics_(build())
    return model, zm.add_unit_noise_(model, batch(2)), build, batch


@pytest.mark.parametrize("name", NETWORKS)
def test_units_that_go_together_share_their_noise(name):
    _, report, _, _ = noisy(name)
    assert [set(group.makers) for group in report.groups] == TOGETHER[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_pruned_units_are_gone_from_plain_networks_and_their_files(name, tmp_path):
    model, report, build, batch = noisy(name)
    drown_(model)
    small = zm.compress(model, batch(3))
    assert_same_predictions(model, small, *map(batch, (1, 5)))
    assert not any(isinstance(m, InputNoise | zm.UnitNoise) for m in small.modules())
    gone = sum(int((~m.keep).sum()) for m in model.modules() if isinstance(m, zm.UnitNoise))
    made = sum(num_units(build())) - sum(num_units(small))
    # Every unit is gone from each of the layers that make it; an embedding is none of these.
    assert made >= gone - (24 if name == "embedding" else 0)
    export.save_compressed(small, tmp_path / "small.safetensors")
    x = batch(4)
    assert torch.equal(export.load_compressed(tmp_path / "small.safetensors")(x), small(x))
    zm.save(model, tmp_path / "noisy.safetensors")
    loaded = zm.load(tmp_path / "noisy.safetensors", build()).eval()
    assert_same_predictions(model, lambda x: zm_mean(loaded, x), x)
    assert len(list(loaded.parameters())) == len(list(model.parameters()))  # Shared as before.
    assert zm.to_deterministic(model).state_dict().keys() == build().state_dict().keys()
    assert_same_predictions(model, zm.to_deterministic(model), x)
    assert len(report.groups) == len(TOGETHER[name])


def zm_mean(model, x):
    with zm.sampling(model, zm.mean):
        return model(x)


@pytest.mark.parametrize("name", ["resnet", "mobile net"])
def test_onnxruntime_runs_what_is_left(name, tmp_path):
    model, _, _, batch = noisy(name)
    drown_(model)
    small = zm.compress(model, batch(3))
    export.save_onnx(small, tmp_path / "m.onnx", batch(2))
    x = batch(5)
    torch.testing.assert_close(
        in_onnxruntime(tmp_path / "m.onnx")(x), small(x), atol=1e-5, rtol=1e-4
    )


def test_samples_multiply_each_unit_for_each_example():
    """Without anything non-linear behind it, the noise of an input is that of the output."""
    torch.manual_seed(0)
    last = nn.Linear(3, 1, bias=False)
    nn.init.ones_(last.weight)
    first = nn.Linear(2, 3)
    model = nn.Sequential(first, last)
    zm.add_unit_noise_(model, torch.rand(2, 2), kl_weight=1.0)
    noise = input_noises(model)["1"].noise
    noise.location.data.fill_(-1.0)
    noise.log_scale.data.fill_(-1.0)
    x = torch.rand(1, 2)
    with torch.no_grad():
        drawn = model(x.expand(200_000, 2))
        units = first(x)[0]
        mean = (units * noise.mean()).sum()
        variance = (units.square() * (noise.mean() / noise.log_snr().exp()).square()).sum()
    assert abs(drawn.mean() - mean) < 4 * (variance / len(drawn)).sqrt()
    assert drawn.var().item() == pytest.approx(variance.item(), rel=0.05)


@pytest.mark.parametrize("norm_first", [False, True])
def test_hidden_units_of_transformer_layers_go(norm_first):
    model = network(
        lambda self, x: self.head(self.encoder(self.embed(x)).mean(1)),
        embed=nn.Embedding(20, 16),
        encoder=nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 40, 0.1, batch_first=True, norm_first=norm_first),
            2,
            enable_nested_tensor=False,
        ),
        head=nn.Linear(16, 3),
    ).eval()
    x = torch.randint(20, (5, 7))
    report = zm.add_unit_noise_(model, x, where=lambda name, layer: name.endswith("linear1"))
    names = [f"encoder.layers.{i}.linear" for i in range(2)]
    assert [g.makers for g in report.groups] == [(f"{n}1",) for n in names]
    assert "encoder (TransformerEncoder)" in report.left["embed"]
    drown_(model)
    assert not torch.equal(model(x), model(x))  # What is left still draws.
    small = zm.compress(model, x)
    assert_same_predictions(model, small, x, torch.randint(20, (2, 4)))
    noises = [m for m in model.modules() if isinstance(m, zm.LogNormalDropout)]
    report = zm.compression_report(model, small)
    for name, noise in zip(names, noises, strict=True):
        kept = int(noise.keep.sum())
        assert report[f"{name}1"].after == (16, kept)
        assert report[f"{name}1"].note == f"{40 - kept} of 40 units gone"
        assert report[f"{name}2"].after == (kept, 16)


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 5, 6)])
def test_units_lie_where_the_layer_reads_them(shape):
    """Each example has multipliers of its own, the same at all positions."""
    linear = nn.Linear(6, 6, bias=False)
    nn.init.eye_(linear.weight)
    noise = zm.LogNormalDropout(2, location=-1.0, log_scale=-1.0)
    index = torch.tensor([0, 1, 2, 1, 0, 2])  # 2 stands for no noise.
    attach_(linear, InputNoise(noise, index, last=True))
    drawn = linear(torch.ones(shape)).view(*shape[:-1], 6)
    assert torch.equal(drawn[..., 0], drawn[..., 4])
    assert torch.equal(drawn[..., 1], drawn[..., 3])
    assert (drawn[..., [2, 5]] == 1).all()
    assert (drawn[..., :2] != 1).all()
    if len(shape) > 1:
        assert drawn[0, ..., 0].unique().numel() == 1
        assert not torch.equal(drawn[0], drawn[1])


def test_images_without_a_batch_have_noise_of_their_channels():
    conv = nn.Conv2d(2, 2, 1, bias=False)
    nn.init.dirac_(conv.weight)
    noise = zm.LogNormalDropout(2, location=-1.0, log_scale=-1.0)
    attach_(conv, InputNoise(noise, torch.tensor([0, 1]), last=False))
    drawn = conv(torch.ones(2, 4, 3))
    assert drawn.shape == (2, 4, 3)
    assert all(channel.unique().numel() == 1 for channel in drawn)


def test_shared_noise_counts_once_and_is_trained():
    model, report, _, batch = noisy("resnet")
    units = {group.units for group in report.groups}
    assert units == {12, 20}
    noises = {noise.noise for noise in input_noises(model).values()}
    expected = sum(noise.kl_weight * noise.kl_per_unit().sum() for noise in noises)
    torch.testing.assert_close(zm.kl_divergence(model), expected)
    (model(batch(3)).square().sum() + zm.kl_divergence(model)).backward()
    assert all(noise.log_scale.grad.abs().min() > 0 for noise in noises)


def test_the_layers_stay_what_they_are():
    build, batch = NETWORKS["resnet"]
    model = build()
    before = model.state_dict()
    conv = model.get_submodule("3.conv2")
    zm.add_unit_noise_(model, batch(2))
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert model.get_submodule("3.conv2") is conv
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(0)
        expected = model.eval()(batch_of_ones())
        torch.manual_seed(0)
        assert torch.equal(again.eval()(batch_of_ones()), expected)
        again.get_submodule("3.conv2.unit_noise.noise").keep.fill_(False)
    assert model.get_submodule("3.conv2.unit_noise.noise").keep.all()


def batch_of_ones():
    return torch.ones(2, 3, 16, 16)


def test_units_cost_what_they_multiply():
    """The square root of the multiplications: those of the unit, and those of who reads it."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5), nn.ReLU(), nn.Linear(5, 3)
    )
    report = zm.add_unit_noise_(model, torch.rand(2, 1, 8, 8))
    filters, neurons = report.groups
    ratio = ((9 * 36 + 36 * 5) / (72 + 3)) ** 0.5
    assert filters.kl_weight / neurons.kl_weight == pytest.approx(ratio)
    mean = (2 * filters.kl_weight + 5 * neurons.kl_weight) / 7
    assert mean == pytest.approx(1.0)
    with pytest.raises(ValueError, match="noise on its units already"):
        zm.add_unit_noise_(model, torch.rand(2, 1, 8, 8))


def test_what_needs_all_units_is_named():
    model = network(
        lambda self, x: self.twice(self.twice(self.norm(self.first(x)))),
        first=nn.Linear(4, 6),
        norm=nn.LayerNorm(6),
        twice=nn.Linear(6, 6),
    )
    with pytest.raises(ValueError, match=r"No units can be removed.*first.*norm \(LayerNorm\)"):
        zm.add_unit_noise_(model, torch.rand(2, 4))
    assert not input_noises(model)


def test_layers_can_be_selected():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    report = zm.add_unit_noise_(model, torch.rand(2, 4), where=lambda name, layer: name == "2")
    assert [group.makers for group in report.groups] == [("2",)]
    assert report.left["0"] == "0 is not selected"
    assert set(input_noises(model)) == {"4"}


def test_the_line_that_cannot_be_traced_is_named():
    def forward(self, x):
        if x.sum() > 0:  # The line.
            x = -x
        return self.second(self.first(x))

    model = network(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2))
    with pytest.raises(ValueError, match=r"line \d+ of .*test_add_unit_noise.py: if x.sum"):
        zm.add_unit_noise_(model, torch.rand(2, 4))
    assert not input_noises(model)


def test_layers_with_noise_stay_deterministic():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    zm.add_unit_noise_(model, torch.rand(2, 4))
    report = zm.make_stochastic_(model)
    assert report.converted == ["0"]
    assert "noise on units" in report.left["2"]


def test_files_name_the_layer_that_a_model_lacks(tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    zm.add_unit_noise_(model, torch.rand(2, 4))
    zm.save(model, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"noise on what '2' reads.*nothing there"):
        zm.load(tmp_path / "m.safetensors", nn.Sequential(nn.Linear(4, 6), nn.ReLU()))
