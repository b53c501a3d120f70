"""Pruning: which weights go, that they stay gone, and the table of what is left."""

import copy
import io
import itertools
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune as torch_prune

import zeromean as zm
from cases import LAYERS, POSTERIORS, PRIORS, SAMPLERS, build, is_allowed
from zeromean.compression.prune import EmptiedWarning

OWN_ALPHA = ["Multiplicative-weight", "Additive"]
SHARED_ALPHA = ["ZeroMean", "Multiplicative-layer", "Multiplicative-neuron"]


def criterion(posterior):
    return "snr" if posterior in (*OWN_ALPHA, "Additive-uniform", "Gamma") else "variance"


def pruned(layer, posterior, prior="None", sampler="weight", sparsity=0.5, **options):
    model = build(layer, posterior, prior, sampler, **options)
    if posterior == "Multiplicative-weight":
        nn.init.normal_(model.weight.log_alpha)
    zm.prune_(model, by=criterion(posterior), sparsity=sparsity)
    return model


def additive(*widths):
    layers = [zm.Linear(a, b, posterior=zm.Additive) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def test_weights_beyond_log_alpha_3_are_pruned_by_default():
    model = additive(20, 30, 5)
    for layer in model:
        layer.weight.log_variance.data.normal_(-4, 4)
    weights = [layer.weight for layer in model]
    expected = [(w.log_variance.exp() / w.mean.square()).log() <= 3 for w in weights]
    result = zm.prune_(model)
    for name, layer, keep in zip("01", model, expected, strict=True):
        assert torch.equal(layer.weight.mask, keep)
        assert result.pruned[name] == int((~keep).sum())
    assert result.emptied == []
    assert result.left == {}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("posterior", "sampler"),
    [(p, s) for p in POSTERIORS for s in SAMPLERS if is_allowed(p, "None", s)],
)
def test_pruned_weight_is_exactly_zero_without_noise_under_every_sampler(layer, posterior, sampler):
    model = pruned(layer, posterior, sampler=sampler, dtype=torch.float64)
    gone = ~model.weight.mask
    assert gone.any()
    mean, variance = model.weight.moments()
    assert mean is None or (mean[gone] == 0).all()
    assert (variance[gone] == 0).all()
    assert (model.weight.sample()[gone] == 0).all()
    # What the parameters of pruned weights are has no influence on anything.
    x = LAYERS[layer][1]()
    x = x.double() if x.is_floating_point() else x
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.weight.named_parameters():
            if parameter.shape == gone.shape:
                parameter[gone] = 3.0 if name.startswith("log") else -7.0
    outputs = []
    for twin in (model, other):
        torch.manual_seed(1)
        outputs.append(twin(x))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("layer", ["Linear", "Conv2d", "ConvTranspose2d", "Embedding"])
@pytest.mark.parametrize("posterior", ["ZeroMean", *OWN_ALPHA, *SHARED_ALPHA[1:]])
@pytest.mark.parametrize("prior", [p for p in PRIORS if is_allowed("Additive", p, "weight")][1:])
def test_pruned_weights_have_no_kl_and_no_gradient(layer, posterior, prior):
    model = pruned(layer, posterior, prior, dtype=torch.float64)
    x = LAYERS[layer][1]()
    x = x.double() if x.is_floating_point() else x
    torch.manual_seed(1)
    kl = model.kl()
    loss = model(x).square().sum() + kl
    loss.backward()
    for parameter in model.weight.parameters():
        if parameter.shape == model.weight.shape:
            assert (parameter.grad[~model.weight.mask] == 0).all()
        assert parameter.grad.isfinite().all()
    if "sample" in prior or prior == "Normal-neuron":
        return  # The layer below has other neurons.
    # The same weights, kept ones alone in a layer of one row.
    keep = model.weight.counted(model.weight.mask)
    line = POSTERIORS[posterior]
    if "neuron" in posterior:
        line = partial(zm.Multiplicative, share="weight")
    small = zm.Linear(int(keep.sum()), 1, posterior=line, prior=PRIORS[prior], dtype=torch.float64)
    mean, scale = model.weight.mean_and_scale()
    with torch.no_grad():
        scale = model.weight.counted(scale)[keep]
        if mean is None:
            small.weight.scale.copy_(scale)
        else:
            small.weight.mean.copy_(model.weight.counted(mean)[keep])
            log_alpha = 2 * (scale.abs() / small.weight.mean[0].abs()).log()
            if posterior == "Additive":
                small.weight.log_variance.copy_(2 * scale.log())
            else:
                shared = small.weight.log_alpha.dim() == 0
                small.weight.log_alpha.copy_(log_alpha[0] if shared else log_alpha)
    torch.testing.assert_close(kl, small.kl(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_pruned_weights_stay_pruned_through_momentum_and_weight_decay(optimizer):
    model = nn.Sequential(
        zm.Conv2d(1, 4, 3, posterior=zm.Additive), nn.Flatten(), additive(16, 3)[0]
    )
    optimize = {
        "adam": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
        "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    }[optimizer](model.parameters())
    x, y = torch.randn(8, 1, 4, 4), torch.randint(3, (8,))

    def step():
        optimize.zero_grad()
        loss = F.cross_entropy(model(x), y)
        zm.elbo_loss(loss, zm.kl_divergence(model), num_data=100).backward()
        optimize.step()

    step()  # Momentum from before the pruning.
    zm.prune_(model, sparsity=0.6)
    masks = [layer.weight.mask.clone() for layer in (model[0], model[2])]
    for _ in range(3):
        step()
    for layer, mask in zip((model[0], model[2]), masks, strict=True):
        assert torch.equal(layer.weight.mask, mask)
        assert (layer.weight.sample()[~mask] == 0).all()
        assert (layer.weight.sample()[mask] != 0).all()


@pytest.mark.parametrize("layer", ["Linear", "Conv2d", "Embedding"])
def test_masks_travel_with_state_dict_deepcopy_and_pickle(layer):
    model = pruned(layer, "Additive", sampler="mean")
    x = LAYERS[layer][1]()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh = build(layer, "Additive", sampler="mean")
    assert "weight.mask" not in fresh.state_dict()
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert fresh.state_dict()["weight.mask"].dtype == torch.bool
    for twin in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.double()):
        assert torch.equal(twin.weight.mask, model.weight.mask)
        outputs = twin(x.double() if twin is model and x.is_floating_point() else x)
        torch.testing.assert_close(outputs.float(), fresh(x))


def test_state_dict_without_a_mask_takes_the_pruning_back():
    model = additive(4, 3)
    before = copy.deepcopy(model.state_dict())
    zm.prune_(model, sparsity=0.5)
    model.load_state_dict({}, strict=False)
    assert model[0].weight.mask is not None
    model.load_state_dict(before)
    assert model[0].weight.mask is None


def test_mask_of_another_shape_is_refused():
    model = additive(4, 3)
    state = {**model.state_dict(), "0.weight.mask": torch.ones(2, 2, dtype=torch.bool)}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight\.mask"):
        model.load_state_dict(state)


@pytest.mark.parametrize("prior", ["LogUniform", "Normal-learn"])
def test_pruned_layer_compiles_and_is_predicted_with_vmap(prior, fresh_dynamo):
    model = nn.Sequential(pruned("Linear", "Additive", prior, "local"), nn.ReLU())
    x = torch.randn(5, 6)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss():
        return model(x).sum() + model[0].kl()

    loss().backward()
    assert (model[0].weight.mean.grad[~model[0].weight.mask] == 0).all()
    samples = zm.sample_outputs(model, x, 4)
    assert samples.shape == (4, 5, 4)
    assert (samples[0] != samples[1]).any()


def test_pruning_twice_accumulates_and_sparsity_counts_what_is_gone():
    model = additive(20, 10)
    first = zm.prune_(model, sparsity=0.3)
    mask = model[0].weight.mask
    model[0].weight.log_variance.data.normal_(-10, 5)
    second = zm.prune_(model, sparsity=0.5)
    assert (first.pruned, second.pruned) == ({"0": 60}, {"0": 40})
    assert not model[0].weight.mask[~mask].any()
    assert zm.prune_(model, sparsity=0.4).pruned == {"0": 0}


def test_global_sparsity_takes_the_least_significant_weights_of_all_layers():
    model = additive(10, 10, 10)
    model[0].weight.log_variance.data.fill_(-7.0)
    result = zm.prune_(model, sparsity=0.5, scope="global")
    assert result.pruned["0"] + result.pruned["1"] == 100
    assert result.pruned["0"] > 70
    log_alphas = [m.weight.log_variance - 2 * m.weight.mean.abs().log() for m in model]
    log_alpha = torch.cat([values.flatten() for values in log_alphas])
    mask = torch.cat([layer.weight.mask.flatten() for layer in model])
    assert log_alpha[mask].max() < log_alpha[~mask].min()


def test_variance_layers_are_pruned_by_variance():
    model = nn.Sequential(zm.Linear(10, 8), zm.Linear(8, 4, posterior=zm.Multiplicative))
    model[1].weight.log_alpha.data.fill_(6.0)
    std = [model[0].weight.scale.abs(), model[1].weight.mean.abs() * math.exp(3.0)]
    zm.prune_(model, by="variance", threshold=0.04)
    for layer, s in zip(model, std, strict=True):
        assert torch.equal(layer.weight.mask, s.square() >= 0.04)


@pytest.mark.parametrize("layer", ["Linear", "Conv2d", "ConvTranspose2d", "Embedding"])
@pytest.mark.parametrize("posterior", ["Additive", "ZeroMean"])
def test_neurons_are_pruned_whole_by_the_alpha_of_all_their_weights(layer, posterior):
    torch.manual_seed(3)
    model = build(layer, posterior, dtype=torch.float64)
    if posterior == "Additive":
        model.weight.log_variance.data.normal_(-3, 3)
    weights = torch.arange(model.weight.numel()).view(model.weight.shape)
    # Which weights an output unit has, found with torch's own layer: those that it depends on.
    plain = model.plain_twin().to_empty(device="cpu").double()
    x = LAYERS[layer][1]()
    x = torch.arange(9) if layer == "Embedding" else x.double()
    groups = []
    for unit in range(model.bias.numel() if model.bias is not None else model.embedding_dim):
        plain.weight.grad = None
        plain.weight.data.fill_(1.0)
        outputs = plain(x)
        outputs.select(-1 if layer in ("Linear", "Embedding") else 1, unit).sum().backward()
        groups.append(weights[plain.weight.grad != 0])
    mean, variance = (None if t is None else t.flatten() for t in model.weight.moments())
    if posterior == "Additive":
        rank = torch.stack([variance[g].sum() / mean[g].square().sum() for g in groups])
    else:
        rank = -torch.stack([variance[g].sum() for g in groups])
    gone = rank.topk(2).indices.tolist()
    result = zm.prune_(model, by=criterion(posterior), unit="neuron", sparsity=2 / len(groups))
    kept = model.weight.mask.flatten()
    for unit, group in enumerate(groups):
        assert kept[group].any() == kept[group].all() == (unit not in gone)
    assert result.pruned == {"the model": sum(len(groups[unit]) for unit in gone)}


def test_neuron_threshold_prunes_at_least_the_neurons_without_a_single_good_weight():
    model = additive(30, 50)
    model[0].weight.log_variance.data.normal_(-8, 4)
    model[0].weight.log_variance.data[:20] += 20
    single = copy.deepcopy(model)
    zm.prune_(single)
    zm.prune_(model, unit="neuron")
    dead = ~single[0].weight.mask.any(1)
    assert dead.any()
    assert not model[0].weight.mask[dead].any()


def test_padding_row_of_an_embedding_is_not_pruned():
    model = build("Embedding", "Additive")
    model.weight.mean.data[2] = 0.5
    with pytest.warns(UserWarning, match="Nothing is left of the model"):
        result = zm.prune_(model, threshold=-100.0)
    assert result.emptied == ["the model"]
    assert torch.equal(model(torch.tensor([2, 3])), torch.tensor([[0.5] * 5, [0.0] * 5]))
    assert model.kl() == 0


@pytest.mark.parametrize(("posterior", "by"), [("Additive", "snr"), ("ZeroMean", "variance")])
def test_padding_row_does_not_stand_in_for_weights_to_prune(posterior, by):
    model = build("Embedding", posterior)
    zm.prune_(model, by=by, sparsity=0.5)
    assert zm.sparsity(model).total.sparsity == pytest.approx(0.5, abs=0.5 / model.weight.numel())


def test_layer_that_loses_everything_is_reported():
    model = additive(4, 3, 2)
    model[1].weight.log_variance.data.fill_(20.0)
    with pytest.warns(UserWarning, match="Nothing is left of 1: what comes after sees a constant"):
        result = zm.prune_(model)
    assert result.emptied == ["1"]
    assert str(result) == "pruned 0 of 0\npruned 6 of 1: nothing is left"
    torch.testing.assert_close(model(torch.randn(2, 4)), model[1].bias.expand(2, 2))
    zm.kl_divergence(model).backward()


@pytest.mark.parametrize("posterior", SHARED_ALPHA)
def test_shared_alpha_is_left_alone_and_refused_when_selected(posterior):
    other = zm.Linear(4, 4, posterior=POSTERIORS[posterior])
    model = nn.Sequential(additive(4, 4)[0], other)
    result = zm.prune_(model, sparsity=0.5)
    assert other.weight.mask is None
    assert "a layer without signal can still be crucial" in result.left["1"]
    with pytest.raises(ValueError, match=r"1 cannot be pruned by snr: .*use by='variance'"):
        zm.prune_(model, where=lambda name, _: name == "1")
    with pytest.raises(ValueError, match="0 cannot be pruned by variance: its means carry"):
        zm.prune_(model, by="variance", sparsity=0.5, where=lambda *_: True)
    with pytest.raises(ValueError, match=r"Nothing to prune by snr \(0: .* share|Nothing.*zero"):
        zm.prune_(nn.Sequential(other))


def test_where_selects_layers_and_tied_posteriors_are_pruned_once():
    model = additive(4, 4, 4, 4)
    model[2].weight = model[0].weight
    result = zm.prune_(model, sparsity=0.5, where=lambda name, layer: name != "1")
    assert result.pruned == {"0": 8}
    assert result.left == {"1": "not selected"}
    assert model[2].weight.mask is model[0].weight.mask


def test_units_of_noise_modules_are_pruned_by_their_signal_to_noise_ratio():
    noise = zm.LogNormalDropout(6)
    noise.log_scale.data = torch.tensor([-3.0, 0.0, 1.0, 2.0, -1.0, 3.0])
    model = nn.Sequential(additive(4, 6)[0], noise, zm.GaussianDropout(6))
    low = noise.log_snr() < 0
    assert low.any()
    assert not low.all()
    result = zm.prune_(copy.deepcopy(model))
    assert result.pruned["1"] == int(low.sum())
    assert "2" in result.left
    zm.prune_(model, sparsity=0.5)
    assert torch.equal(noise.keep, noise.log_snr() >= noise.log_snr().sort().values[3])
    result = zm.prune_(model, sparsity=0.6, scope="global")
    assert "no common order" in result.left["1"]
    with pytest.warns(EmptiedWarning, match="Nothing is left of 1"):
        zm.prune_(model, threshold=-100.0, where=lambda name, _: name == "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "magnitude"}, "by must be one of snr, variance, got 'magnitude'"),
        ({"scope": "model"}, "scope must be one of layer, global"),
        ({"unit": "filter"}, "unit must be one of weight, neuron"),
        ({"threshold": math.nan}, "threshold must be a finite log α, got nan"),
        ({"threshold": math.inf}, "threshold must be a finite log α, got inf"),
        ({"sparsity": 1.0}, "from 0 to below 1, got 1.0"),
        ({"sparsity": -0.1}, "from 0 to below 1, got -0.1"),
        ({"sparsity": 0.5, "threshold": 3.0}, "a threshold or a sparsity, got threshold=3.0"),
        ({"by": "variance"}, "no usual threshold; pass threshold= or sparsity="),
        ({"by": "variance", "threshold": 0.0}, "must be a positive variance, got 0.0"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, message):
    model = nn.Sequential(additive(4, 4)[0], zm.Linear(4, 4))
    with pytest.raises(ValueError, match=message):
        zm.prune_(model, **arguments)
    assert model[0].weight.mask is None


def test_deterministic_and_unsound_models_are_refused():
    with pytest.raises(ValueError, match="no posterior to prune by; convert it with"):
        zm.prune_(nn.Sequential(nn.Linear(3, 2)))
    model = additive(3, 2)
    model[0].weight.mean.data[0, 0] = math.nan
    for unit in ("weight", "neuron"):
        with pytest.raises(ValueError, match="0 has NaN among its parameters"):
            zm.prune_(model, unit=unit)


def test_clipping_log_alpha_leaves_pruned_weights_alone():
    model = additive(5, 4)
    zm.prune_(model, sparsity=0.5)
    zm.clip_log_alpha_(model, low=-2.0)
    assert model[0].weight.log_variance.isfinite().all()
    log_alpha = model[0].weight.log_alpha_per_weight()
    assert (log_alpha[model[0].weight.mask] >= -2.0001).all()
    assert log_alpha[~model[0].weight.mask].isposinf().all()


def test_pruned_weights_stay_pruned_when_the_means_are_dropped():
    model = additive(5, 4)
    model[0].weight.log_variance.data.fill_(8.0)
    zm.prune_(model, sparsity=0.5)
    mask = model[0].weight.mask
    zm.zero_mean_(model)
    assert not model[0].weight.has_mean
    assert torch.equal(model[0].weight.mask, mask)


def test_sparsity_counts_every_weight_tensor_once():
    model = nn.Sequential(
        additive(20, 10)[0], nn.Linear(10, 10), zm.Linear(10, 5), nn.Linear(5, 5), nn.LayerNorm(5)
    )
    model.append(model[0])
    torch_prune.random_unstructured(model[1], "weight", amount=40)
    zm.prune_(model, sparsity=0.75)
    model[3].half()
    table = zm.sparsity(model)
    assert [(r.name, r.weights, r.kept, r.bits) for r in table.layers] == [
        ("0", 200, 50, 32),
        ("1", 100, 60, 32),
        ("2", 50, 50, 32),
        ("3", 25, 25, 16),
    ]
    assert table["0"].sparsity == 0.75
    assert table["0"].compression == 4
    assert table.total.weights == 375
    assert table.total.kept == 185
    assert table.total.compression == 375 / 185
    lines = str(table).splitlines()
    assert lines[0].split() == ["layer", "weights", "kept", "sparsity", "bits", "compression"]
    assert lines[1].split() == ["0", "200", "50", "75.00%", "32", "4.0×"]
    assert lines[-1].split()[:4] == ["total", "375", "185", "50.67%"]
    assert len(set(map(len, lines))) == 1


def test_sparsity_of_an_empty_layer_is_one_and_its_factor_infinite():
    model = additive(3, 2)
    with pytest.warns(UserWarning, match="Nothing is left"):
        zm.prune_(model, threshold=-50.0)
    row = zm.sparsity(model).total
    assert (row.kept, row.sparsity, row.compression) == (0, 1.0, math.inf)
    with pytest.raises(KeyError):
        zm.sparsity(model)["1"]
    with pytest.raises(ValueError, match="no weights to count"):
        zm.sparsity(nn.ReLU())


@pytest.mark.parametrize("change", [zm.prune_, zm.quantize_])
def test_layers_with_several_weights_are_selected_by_their_name(change):
    model = nn.ModuleDict(
        {
            "lstm": zm.LSTM(4, 3, posterior=zm.Additive),
            "head": zm.Linear(3, 2, posterior=zm.Additive),
        }
    )
    asked = []

    def where(name, layer):
        asked.append((name, type(layer)))
        return name == "lstm"

    result = change(model, where=where)
    assert set(asked) == {("lstm", zm.LSTM), ("head", zm.Linear)}
    assert result.left == {"head": "not selected"}


def test_units_with_nan_are_refused():
    noise = zm.LogNormalDropout(5)
    with torch.no_grad():
        noise.location[0] = math.nan
    with pytest.raises(ValueError, match="NaN among its parameters"):
        zm.prune_(nn.Sequential(nn.Linear(3, 5), noise))
