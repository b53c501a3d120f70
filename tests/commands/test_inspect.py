"""`zeromean inspect`: what it says of a file is what is in it."""

import math
import struct
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zeromean as zm
from zeromean import cli, export
from zeromean.compression import histograms
from zeromean.compression.random_weights import kl_of, measure, weights_in
from zeromean.files.contents import read_contents


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 6)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(self.embedding(tokens).tanh())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.up = nn.ConvTranspose2d(4, 6, 2, groups=2)
        self.gru = nn.GRU(5, 3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.gru(x)[0])


POSTERIORS = {
    "Additive": partial(zm.Additive, log_variance=-3.0),
    "layer": partial(zm.Multiplicative, share="layer", log_alpha=-1.0),
    "weight": partial(zm.Multiplicative, share="weight", log_alpha=-1.0),
    "FullCovariance": partial(zm.FullCovariance, log_variance=-3.0),
}


def inspect(*arguments):
    return cli.main(["inspect", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("posterior", "prior"),
    [
        (posterior, prior)
        for posterior in POSTERIORS
        for prior in (zm.Normal(0.7), zm.Normal(learn=True), zm.LogUniform(kl="approx"), None)
        # Which is for independent weights.
        if (posterior, type(prior)) != ("FullCovariance", zm.LogUniform)
    ],
    ids=str,
)
def test_posteriors_are_rebuilt_without_the_architecture(posterior, prior):
    model = Mixed()
    zm.make_stochastic_(model, posterior=POSTERIORS[posterior], prior=prior)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if posterior in ("Additive", "weight"):
        zm.prune_(model, sparsity=0.3)
    zm.save(model, "m.safetensors")
    from_file = read_contents("m.safetensors").weights
    from_model = weights_in(model)
    assert set(from_file) == set(from_model)
    for name, weight in from_file.items():
        expected, found = measure(from_model[name].posterior), measure(weight.posterior)
        assert (found.shape, found.parameters, found.kept) == (
            expected.shape,
            expected.parameters,
            expected.kept,
        )
        np.testing.assert_allclose(found.log_alpha, expected.log_alpha, rtol=1e-5)
        np.testing.assert_allclose(found.log10_scale, expected.log10_scale, rtol=1e-5)
        assert found.effective_log_alpha == pytest.approx(expected.effective_log_alpha)
        assert (weight.layer, weight.described) == (
            from_model[name].layer,
            from_model[name].described,
        )
    if prior is not None:
        total = sum(kl_of(weight) for weight in from_file.values())
        assert total == pytest.approx(float(zm.kl_divergence(model).detach()), rel=1e-5)


def test_a_filter_of_a_transposed_convolution_has_its_own_alpha():
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, groups=2))
    zm.make_stochastic_(model, posterior=partial(zm.Multiplicative, share="neuron"))
    with torch.no_grad():
        model[0].weight.log_alpha.copy_(torch.arange(6.0))
    zm.save(model, "m.safetensors")
    (weight,) = read_contents("m.safetensors").weights.values()
    expected = model[0].weight.log_alpha_per_weight()
    assert torch.equal(weight.posterior.log_alpha_per_weight(), expected)


def test_numbers_of_a_posterior_are_those_of_its_definition():
    layer = zm.Linear(3, 2, posterior=zm.Additive)
    with torch.no_grad():
        layer.weight.mean.copy_(torch.tensor([[1.0, 2.0, 4.0], [-1.0, 8.0, 0.5]]))
        layer.weight.log_variance.fill_(math.log(0.25))
    layer.weight.mask = torch.tensor([[True, True, True], [True, True, False]])
    numbers = measure(layer.weight)
    signal = np.array([1.0, 2.0, 4.0, 1.0, 8.0])
    np.testing.assert_allclose(numbers.log_alpha, np.log(0.25 / signal**2), rtol=1e-6)
    np.testing.assert_allclose(10**numbers.log10_snr, signal / 0.5, rtol=1e-6)
    np.testing.assert_allclose(10**numbers.log10_scale, 0.5, rtol=1e-6)
    assert numbers.sparsity == pytest.approx(1 / 6)
    assert numbers.parameters == 12


def test_a_saved_file_is_told_from_top_to_bottom(capsys):
    model = nn.Sequential(
        zm.Linear(4, 5, posterior=zm.Additive),
        nn.BatchNorm1d(5),
        zm.Linear(5, 3, posterior=partial(zm.ZeroMean, noise=zm.rademacher)),
    )
    zm.prune_(model, sparsity=0.5, where=lambda name, _: name == "0")
    zm.save(model, "m.safetensors")
    assert inspect("m.safetensors") == 0
    printed = capsys.readouterr().out
    assert "of zm.save, format version 2, checksum crc32:" in printed
    lines = {line.split()[0]: line for line in printed.splitlines() if line.split()}
    row = next(line for line in printed.splitlines() if line.startswith("0  "))
    assert "Additive" in row
    assert "5 × 4" in row
    assert "50.00%" in row
    assert f"{float(zm.kl_divergence(model).detach()):,.1f}" in row
    assert "ZeroMean of rademacher noise" in printed
    assert "together: 35 weights, 25 kept (28.57% pruned), 55 parameters" in printed
    assert "Scales of the weights with mean zero" in printed
    assert "1.num_batches_tracked" in lines
    assert "Ties" not in printed
    assert "Layers without noise" not in printed


def test_ties_are_named_and_counted_once(capsys, tmp_path, monkeypatch):
    model = Tied()
    zm.make_stochastic_(model, posterior=zm.Additive, sampler=zm.weight)
    zm.save(model, "m.safetensors")
    assert inspect("m.safetensors") == 0
    printed = capsys.readouterr().out
    assert "decoder has the weight of embedding" in printed
    assert "together: 24 weights" in printed
    assert "the KL of an Embedding needs --model" in printed
    monkeypatch.setattr("zeromean.commands.networks.build_network", lambda factory: Tied())
    assert inspect("m.safetensors", "--model", "any:thing") == 0
    printed = capsys.readouterr().out
    assert f"KL {float(zm.kl_divergence(model).detach()):,.1f}" in printed
    assert "needs --model" not in printed


def test_single_parameters_that_are_shared_are_named(capsys):
    model = nn.Sequential(*(zm.Linear(3, 3, posterior=zm.Multiplicative) for _ in range(2)))
    model[1].weight.log_alpha = model[0].weight.log_alpha
    zm.save(model, "m.safetensors")
    assert inspect("m.safetensors") == 0
    printed = capsys.readouterr().out
    assert "1.weight.log_alpha is 0.weight.log_alpha" in printed
    assert "format version 4" in printed


def test_a_compressed_file_describes_its_network(capsys):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), zm.Linear(5, 3, prior=None))
    with torch.no_grad():
        model[0].weight[:, :2] = 0
    export.save_compressed(model, "c.safetensors")
    assert inspect("c.safetensors") == 0
    printed = capsys.readouterr().out
    assert "of export.save_compressed" in printed
    assert "in_features=4, out_features=5" in printed
    assert "50.00%" in next(x for x in printed.splitlines() if x.startswith("0.weight"))
    assert not any(line.startswith("2.weight") for line in printed.splitlines())
    assert "Scales of the weights with mean zero" in printed


def test_a_network_without_noise_is_told_too(capsys):
    zm.save(nn.Linear(3, 2), "m.safetensors")
    assert inspect("m.safetensors") == 0
    printed = capsys.readouterr().out
    assert "No random weights." in printed
    assert "2 × 3" in printed


def test_parts_that_are_not_known_here_are_named(capsys):
    model = zm.Linear(3, 2, posterior=zm.Additive)
    zm.save(model, "m.safetensors")
    from zeromean.files import model as saved

    header = '{"format_version": 1, "aliases": {}, "layers": {"": {"layer": "Linear", "posterior": '
    header += '"Own", "noise": "normal", "prior": null, "sampler": "local", "tied_to": null}}}'
    save_file({n: t.detach() for n, t in model.state_dict().items()}, "o", {saved.HEADER: header})
    assert inspect("o") == 0
    assert "not known here: Own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("low", "high", "values", "drawn"),
    [
        (0, 4, [0.5, 1.5, 1.5, 9.0], "▄█ ▄"),
        (0, 4, [], "    "),
        (0, 4, [-math.inf, 2.5], "█ █ "),
        (0, 4, [0.5] * 1000 + [3.5], "█  ▁"),
    ],
)
def test_histograms_in_text(low, high, values, drawn):
    assert histograms.in_text(np.array(values), low, high, 4) == drawn


def test_pictures_are_sound_and_have_a_layer_each(capsys, tmp_path):
    layers = [zm.Linear(6, 6, posterior=zm.Additive) for _ in range(4)]
    zm.save(nn.Sequential(*layers, zm.Linear(6, 6)), "m.safetensors")
    assert inspect("m.safetensors", "--pictures", "new/pictures") == 0
    assert capsys.readouterr().out.count("wrote ") == 3
    for name, rows in (("log_alpha", 2), ("snr", 2), ("scale", 1)):
        content = (tmp_path / "new" / "pictures" / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n")
        width, height = struct.unpack(">II", content[16:24])
        assert height == pytest.approx(120 * (1.9 * rows + 0.8), abs=2)
        assert width > 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.safetensors"], "There is no file none.safetensors."),
        (["short.safetensors"], "not a complete safetensors file"),
        (["changed.safetensors"], "its checksum does not fit"),
        (["other.safetensors"], "not one that zm.save or export.save_compressed wrote"),
        (["header.safetensors"], "has a damaged header"),
        (["new.safetensors"], "has format version 99"),
        (["m.safetensors", "--model", "zeromean.models:lenet5"], "needs a Linear at"),
        (["m.safetensors", "--pictures", "m.safetensors"], "cannot write into m.safetensors"),
    ],
)
def test_what_cannot_be_inspected_is_one_sentence(arguments, said, capsys, tmp_path):
    zm.save(nn.Sequential(zm.Linear(3, 2, posterior=zm.Additive)), "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(content[:-3])
    (tmp_path / "changed.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    save_file({"a": torch.ones(2)}, "other.safetensors", {"format": "pt"})
    save_file({"a": torch.ones(2)}, "header.safetensors", {"zeromean": '{"format_version": 1}'})
    save_file({"a": torch.ones(2)}, "new.safetensors", {"zeromean": '{"format_version": 99}'})
    assert inspect(*arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
