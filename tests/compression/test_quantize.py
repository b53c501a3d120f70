"""Bit widths from posteriors: against the definition, and by what is left of the predictions."""

import copy
import math
import sys
from functools import partial

import pytest
import torch
from safetensors import safe_open
from torch import nn

import zeromean as zm
from zeromean import export
from zeromean.compression.candidates import LOG_ALPHA_THRESHOLD
from zeromean.compression.quantize import MAX_BITS

every_per = pytest.mark.parametrize("per", ["layer", "neuron", "weight"])
LAYERS = {
    "Linear": lambda **o: zm.Linear(20, 7, **o),
    "Conv2d": lambda **o: zm.Conv2d(4, 6, 3, groups=2, **o),
    "ConvTranspose2d": lambda **o: zm.ConvTranspose2d(4, 6, 3, groups=2, **o),
    "Embedding": lambda **o: zm.Embedding(9, 5, padding_idx=2, **o),
}
every_layer = pytest.mark.parametrize("layer", LAYERS)


def trained(layer, log_variance=-6.0):
    """A layer whose posterior has standard deviations of many sizes."""
    layer = LAYERS[layer](posterior=zm.Additive)
    with torch.no_grad():
        layer.weight.log_variance.normal_(log_variance, 1.0)
    return layer


def deviations(before, layer):
    error = (layer.weight.mean - before) / (0.5 * layer.weight.log_variance).exp()
    return layer.weight.counted(error)


def root_mean_square(before, layer):
    """Of the errors, by the number of weights that are more than noise."""
    readable = layer.weight.log_variance <= LOG_ALPHA_THRESHOLD + 2 * before.abs().log()
    count = layer.weight.counted(readable).sum()
    return (deviations(before, layer).square().sum() / count).sqrt()


@every_layer
@every_per
def test_rounding_errors_stay_within_the_tolerance(layer, per):
    layer = trained(layer)
    before = layer.weight.mean.detach().clone()
    report = zm.quantize_(nn.Sequential(layer), per=per, tolerance=0.3)
    errors = deviations(before, layer)
    rms = root_mean_square(before, layer)
    assert 0.01 < rms <= 0.3 + 1e-4
    torch.testing.assert_close(rms.item(), report.layers[0].deviation, rtol=1e-3, atol=1e-4)
    if per == "weight":
        assert errors.abs().max() <= 0.3 + 1e-4
    assert report.layers[0].weights == before.numel()
    assert 1 <= report.layers[0].bits <= MAX_BITS


def test_one_bit_less_would_break_the_tolerance():
    original = trained("Linear")
    report = zm.quantize_(copy.deepcopy(original), tolerance=0.3)
    bits = round(report.layers[0].bits)
    for width, fine in ((bits, True), (bits - 1, False)):
        layer = copy.deepcopy(original)
        zm.quantize_(layer, bits=width)
        rms = deviations(original.weight.mean, layer).square().mean().sqrt()
        assert (rms <= 0.3) == fine


def test_weights_that_are_noise_do_not_hide_errors_of_the_others():
    """A trained sparse layer, not pruned: a few weights matter, all others are noise."""
    torch.manual_seed(0)
    few, many = (zm.Linear(size, 1, posterior=zm.Additive, bias=False) for size in (10, 10_000))
    with torch.no_grad():
        few.weight.mean.normal_()
        few.weight.log_variance.fill_(-7.0)
        many.weight.mean.normal_(0, 1e-3)
        many.weight.log_variance.fill_(-4.0)
        many.weight.mean[:, :10] = few.weight.mean
        many.weight.log_variance[:, :10] = few.weight.log_variance
    before = few.weight.mean.detach().clone()
    alone, among = (zm.quantize_(layer).layers[0] for layer in (few, many))
    assert among.bits == alone.bits
    torch.testing.assert_close(many.weight.mean[:, :10], few.weight.mean)
    assert (few.weight.mean - before).square().mean().sqrt() < 0.5 * math.exp(-3.5)
    assert among.deviation == pytest.approx(alone.deviation, rel=0.2)


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@every_layer
def test_weights_lie_on_a_symmetric_grid(layer, bits):
    layer = trained(layer)
    zm.quantize_(layer, bits=bits)
    values = layer.weight.mean.unique()
    if isinstance(layer, zm.Embedding):
        assert (layer.weight.mean[layer.padding_idx] == 0).all()
        values = values[values != 0]
    ratios = values / (values.abs().max() / max(2 ** (bits - 1) - 1, 1))
    torch.testing.assert_close(ratios, ratios.round(), rtol=1e-5, atol=1e-4)
    assert bits > 1 or len(values) == 2


@every_layer
def test_neurons_have_scales_of_their_own(layer):
    layer = trained(layer)
    before = layer.weight.mean.detach().clone()
    with torch.no_grad():
        # One output unit with weights a hundred times larger must not coarsen the others.
        unit = [slice(None)] * before.dim()
        unit[layer.weight.layout.neuron_dim] = 0
        layer.weight.mean[tuple(unit)] *= 100
    by_neuron, by_layer = copy.deepcopy(layer), copy.deepcopy(layer)
    zm.quantize_(by_neuron, per="neuron", bits=4)
    zm.quantize_(by_layer, per="layer", bits=4)
    dim = layer.weight.layout.neuron_dim
    small = torch.arange(1, before.shape[dim])
    errors = [
        (quantized.weight.mean - before).index_select(dim, small).abs().max()
        for quantized in (by_neuron, by_layer)
    ]
    assert errors[0] < 0.1 * before.abs().max()
    assert errors[1] > 0.3 * before.abs().max()


def test_more_noise_needs_fewer_bits():
    bits = []
    for log_variance in (-14.0, -10.0, -6.0, -2.0):
        torch.manual_seed(0)
        layer = trained("Linear", log_variance)
        bits.append(zm.quantize_(layer).layers[0].bits)
    assert bits == sorted(bits, reverse=True)
    # Four e-folds of variance are two of the step: close to 3 bits.
    assert 2 <= bits[0] - bits[1] <= 4


def file_of(model, path):
    """Bytes of the whole file, and of each weight in it."""
    saved = export.save_compressed(zm.to_deterministic(model), path)
    with safe_open(path, framework="pt") as file:
        parts = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118, RUF100
    sizes = {}
    for name, nbytes in parts.items():
        layer = name.split(".")[0]
        sizes[layer] = sizes.get(layer, 0) + ("weight" in name) * nbytes
    return saved.size, sizes


def sparse_chain():
    model = nn.Sequential(
        zm.Linear(60, 40, posterior=partial(zm.Additive, log_variance=-6.0)),
        nn.BatchNorm1d(40),
        nn.ReLU(),
        zm.Linear(40, 20, posterior=partial(zm.Additive, log_variance=-6.0)),
    ).eval()
    for layer in zm.stochastic_layers(model).values():
        layer.weight.mask = torch.rand(layer.weight.shape) < 0.2
    return model


@every_per
@pytest.mark.parametrize("bits", [None, 1, 2, 5, 9])
def test_sizes_are_those_of_the_file(per, bits, tmp_path):
    model = sparse_chain()
    report = zm.quantize_(model, per=per, bits=bits, inputs=torch.randn(100, 60))
    size, weights = file_of(model, tmp_path / "m.safetensors")
    assert report.whole_file
    assert report.size == size
    assert {row.name: row.size for row in report.layers} == {n: weights[n] for n in ("0", "3")}
    originals = 4 * (60 * 40 + 40 * 20 + 40 + 20 + 4 * 40) + 8  # 8: num_batches_tracked
    assert report.original_size == originals
    assert report.compression == originals / size
    x = torch.randn(7, 60)
    plain = zm.to_deterministic(model)
    assert torch.equal(export.load_compressed(tmp_path / "m.safetensors")(x), plain(x))


@every_per
@pytest.mark.parametrize("density", [1.0, 0.3, 0.03])
def test_the_file_needs_the_bits_of_the_weights_and_of_their_places(per, density):
    """Against Shannon: entropy of the multiples, and of a mask of this density."""
    layer = zm.Linear(400, 100, bias=False, posterior=zm.Additive)
    layer.weight.mask = torch.rand(100, 400) < density
    report = zm.quantize_(layer, per=per, bits=4)
    values = layer.weight.mean_weight()
    steps = {"neuron": values.abs().amax(1, keepdim=True)}.get(per, values.abs().max()) / 7
    _, counts = (
        (values[values != 0] / steps.expand_as(values)[values != 0])
        .round()
        .unique(return_counts=True)
    )
    share = (values != 0).float().mean().item()
    places = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) if share < 1 else 0.0
    frequencies = counts / counts.sum()
    entropy = -(frequencies * frequencies.log2()).sum().item() * counts.sum().item()
    least = (entropy + 40_000 * places) / 8
    tables = 4 * {"neuron": 100}.get(per, 15)
    assert report.layers[0].size < 1.15 * least + tables + 40
    assert report.layers[0].size < 0.6 * 40_000 * 4 / 8 + tables + 40 if density < 1 else True


def test_batchnorm_before_and_after_a_file_is_within_two_roundings(tmp_path):
    model = sparse_chain()
    model(torch.randn(50, 60))
    with torch.no_grad():
        model[1].running_var.uniform_(0.1, 3.0)
    zm.quantize_(model, inputs=torch.randn(100, 60) * 2)
    small = zm.compress(model)
    saved = export.save_compressed(small, tmp_path / "m.safetensors", original=model)
    assert saved.ratio > 3
    again = export.load_compressed(tmp_path / "m.safetensors")
    for mine, other in zip(again.state_dict().values(), small.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=3e-7, atol=0)
    x = torch.randn(9, 60)
    torch.testing.assert_close(again(x), small(x), rtol=1e-5, atol=1e-5)


def behind(layer):
    """BatchNorm that has seen the outputs of the layer, as it is after training."""
    model = nn.Sequential(layer, nn.BatchNorm1d(8)).train()
    with zm.sampling(model, zm.mean), torch.no_grad():
        for _ in range(60):
            model(torch.randn(200, 30) + 1)
    return model.eval()


def coarse():
    torch.manual_seed(0)
    layer = zm.Linear(30, 8, bias=False, posterior=partial(zm.Additive, log_variance=-4.0))
    return behind(layer)


def test_batchnorm_behind_rounded_layers_is_recalibrated_with_inputs():
    """Its outputs have mean zero and variance one on the data again, which rounding spoilt."""
    x = torch.randn(4000, 30) + 1

    def offset(model):
        with zm.sampling(model, zm.mean), torch.no_grad():
            outputs = model(x)
        return (outputs.mean(0).abs().max() + (outputs.std(0) - 1).abs().max()).item()

    stale, fresh = coarse(), coarse()
    assert offset(stale) < 0.15
    with pytest.warns(UserWarning, match=r"1 keeps the statistics.*pass inputs= with training"):
        report = zm.quantize_(stale, bits=1)
    assert report.outdated == ("1",)
    assert report.recalibrated == 0
    assert "1: its statistics are those of before" in str(report)
    report = zm.quantize_(fresh, bits=1, inputs=[(x[:2000], None), (x[2000:], None)])
    assert (report.outdated, report.recalibrated) == ((), 2)
    assert offset(fresh) < 0.01 < 0.3 < offset(stale)
    assert not fresh.training
    assert fresh[1].momentum == 0.1


def test_inputs_that_do_not_fit_leave_everything_as_it_was():
    model = coarse()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="needs an input of shape"):
        zm.quantize_(model, bits=2, inputs=torch.randn(10, 29))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


class Unordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dense = zm.Linear(4, 4, posterior=zm.Additive)

    def forward(self, x):
        return self.norm(self.dense(x)).sort(-1).values


def test_what_may_be_behind_a_rounded_layer_is_named():
    layer = partial(zm.Linear, 4, 4, posterior=zm.Additive)
    with pytest.warns(UserWarning, match="norm keeps the statistics"):
        report = zm.quantize_(Unordered())
    assert not report.whole_file  # A file knows the layers of torch, not this one.
    assert "in the tensors of a file" in str(report)
    # In front of all of them, without statistics, or not there: nothing to say.
    for model in (
        nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(layer())),
        nn.Sequential(layer(), nn.BatchNorm1d(4, track_running_stats=False)),
        nn.Sequential(layer(), nn.LayerNorm(4)),
    ):
        report = zm.quantize_(model, inputs=None)
        assert report.outdated == ()
    assert zm.quantize_(nn.Sequential(layer()), inputs=torch.ones(5, 4)).recalibrated == 0
    shared = nn.BatchNorm1d(4)
    with pytest.warns(UserWarning, match="2 keeps the statistics"):
        zm.quantize_(nn.Sequential(shared, layer(), shared))


def test_sizes_without_safetensors_are_those_of_the_tensors(monkeypatch):
    model = sparse_chain()
    whole = zm.quantize_(copy.deepcopy(model), bits=4, inputs=torch.randn(50, 60))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    report = zm.quantize_(model, bits=4, inputs=torch.randn(50, 60))
    assert not report.whole_file
    assert report.layers == whole.layers
    assert 0 < report.rest < whole.rest


def test_pruned_weights_stay_pruned_and_cost_only_positions():
    layer = zm.Linear(100, 10, posterior=zm.Additive)
    layer.weight.mask = torch.rand(10, 100) < 0.05
    before = layer.weight.mean.detach().clone()
    kept = int(layer.weight.mask.sum())
    report = zm.quantize_(layer, bits=5)
    assert report.layers[0].nonzero <= kept
    assert report.layers[0].size <= math.ceil((40 + kept * 5 + kept * 10) / 8) + 25
    assert 40 <= report.rest < 1000  # The biases, and the header.
    pruned = ~layer.weight.mask
    assert torch.equal(layer.weight.mean[pruned], before[pruned])
    assert (layer.weight.moments()[0][pruned] == 0).all()


@every_per
def test_a_fully_pruned_layer_costs_next_to_nothing(per):
    layer = zm.Linear(10, 4, posterior=zm.Additive)
    layer.weight.mask = torch.zeros(4, 10, dtype=torch.bool)
    report = zm.quantize_(layer, per=per)
    assert report.layers[0].nonzero == 0
    assert report.layers[0].size <= 30


def test_predictions_change_less_than_by_one_draw_of_the_weights():
    model = nn.Sequential(
        zm.Linear(16, 32, posterior=partial(zm.Additive, log_variance=-5.0)),
        nn.Tanh(),
        zm.Linear(32, 3, posterior=partial(zm.Additive, log_variance=-5.0)),
    )
    x = torch.randn(200, 16)
    with zm.sampling(model, zm.mean), torch.no_grad():
        before = model(x)
    drawn = zm.sample_outputs(model, x, 50, sampler=zm.weight)
    zm.quantize_(model, tolerance=0.5)
    with zm.sampling(model, zm.mean), torch.no_grad():
        after = model(x)
    assert (after - before).square().mean() < 0.5 * (drawn - before).square().mean()
    plain = zm.to_deterministic(model)
    torch.testing.assert_close(plain(x), after)


def test_report_names_what_was_left_and_prints_a_table():
    model = nn.Sequential(
        zm.Linear(4, 4, posterior=zm.Additive), zm.Linear(4, 4), nn.Linear(4, 2), zm.LSTM(4, 3)
    )
    report = zm.quantize_(model, where=lambda name, module: name != "0")
    assert [row.name for row in report.layers] == ["3.weight_ih_l0", "3.weight_hh_l0"]
    assert report.left == {
        "0": "not selected",
        "1": "all its means are zero; there is nothing to round",
    }
    everything = [*zm.to_deterministic(model, "sample").parameters()]
    assert report.original_size == sum(p.nbytes for p in everything)
    text = str(report)
    assert "3.weight_hh_l0" in text
    assert f"{report.compression:.1f}×" in text


def test_tied_posteriors_are_quantized_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = zm.Embedding(9, 5, posterior=zm.Additive)
            self.decoder = zm.Linear(5, 9, posterior=zm.Additive)
            self.decoder.weight = self.embedding.weight

    assert [row.name for row in zm.quantize_(Tied()).layers] == ["embedding"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bits": 0}, "bits must be a whole number from 1 to 24, got 0"),
        ({"bits": 25}, "bits must be a whole number from 1 to 24"),
        ({"bits": 2.5}, "bits must be a whole number from 1 to 24, got 2.5"),
        ({"tolerance": 0.0}, "tolerance must be a positive number"),
        ({"per": "filter"}, "per must be one of layer, neuron, weight"),
    ],
)
def test_wrong_settings_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        zm.quantize_(trained("Linear"), **options)


def test_models_without_means_to_round_are_refused():
    with pytest.raises(ValueError, match="no posterior to choose bit widths from; convert it"):
        zm.quantize_(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"Nothing to quantize \(0: all its means are zero"):
        zm.quantize_(nn.Sequential(zm.Linear(3, 2)))
    broken = trained("Linear")
    broken.weight.mean.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        zm.quantize_(broken)


def test_shared_posteriors_are_quantized_where_they_are_selected():
    model = nn.Sequential(
        zm.Linear(4, 4, posterior=zm.Additive), zm.Linear(4, 4, posterior=zm.Additive)
    )
    model[1].weight = model[0].weight
    result = zm.quantize_(model, where=lambda name, _: name == "1")
    assert [row.name for row in result.layers] == ["1"]
    plain = 4 * (16 + 8)  # bytes of one weight and two biases
    assert result.original_size == plain


def test_a_model_of_which_nothing_is_left_has_a_size():
    model = nn.Sequential(zm.Linear(4, 3, bias=False, posterior=zm.Additive))
    with pytest.warns(UserWarning, match="Nothing is left"):
        zm.prune_(model, threshold=-1000.0)
    result = zm.quantize_(model)
    assert result.size > 0
    assert f"{result.compression:.1f}× fewer" in str(result)


def test_standard_deviations_that_are_not_finite_are_refused():
    model = zm.Linear(3, 2, posterior=zm.Additive)
    before = model.weight.mean.detach().clone()
    model.weight.log_variance.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="standard deviations that are not finite"):
        zm.quantize_(model)
    assert torch.equal(model.weight.mean, before)
