import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import zeromean as zm
from zeromean.layers.stochastic_module import stochastic_modules

SLIGHTLY_NOISY = partial(zm.Additive, log_variance=-8.0)
VOCABULARY, PADDING = 20, 0


class BasicBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += shortcut
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 8, 2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.blocks(self.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """A token model with a tied decoder; `decoder_first` sets which of the two comes first."""

    def __init__(self, decoder_first=False):
        super().__init__()
        decoder = nn.Linear(16, VOCABULARY, bias=False)
        embedding = nn.Embedding(VOCABULARY, 16, padding_idx=PADDING)
        decoder.weight = embedding.weight
        if decoder_first:
            self.decoder = decoder
        self.embedding = embedding
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = decoder

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.decoder(self.encoder(x, src_key_padding_mask=tokens == PADDING))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=PADDING)
        self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def images():
    x = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(24) % 3
    return x + labels.view(-1, 1, 1, 1), labels


def tokens():
    x = torch.randint(1, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(0))
    x[2:, 5:] = PADDING
    return x


def trained(model, x):
    """Give BatchNorm statistics of its own, so that eval mode is no identity."""
    with torch.no_grad():
        model.train()(x)
    return model.eval()


def mean_output(model, x):
    with torch.no_grad(), zm.sampling(model, zm.mean):
        return model(x)


def training_losses(model, x, y, steps=20):
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        nll = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=10_000)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def assert_learns(model, x, y):
    losses = training_losses(model, x, y)
    assert losses.isfinite().all()
    assert losses[-3:].mean() < 0.9 * losses[:3].mean()
    assert all(p.isfinite().all() for p in model.parameters())


def assert_probabilities(model, x, classes):
    probabilities = zm.predict_proba(model, x, 4, seed=0)
    assert probabilities.shape[-1] == classes
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(probabilities.shape[:-1]))
    assert torch.equal(probabilities, zm.predict_proba(model, x, 4, seed=0))


# Whole models.


@pytest.mark.parametrize("posterior", [SLIGHTLY_NOISY, zm.Multiplicative])
def test_converted_resnet_keeps_its_outputs_as_means(posterior):
    x, _ = images()
    model = trained(ResNet(), x)
    before = model(x).detach()
    report = zm.make_stochastic_(model, posterior=posterior)
    assert not model.training
    torch.testing.assert_close(mean_output(model, x), before, rtol=1e-6, atol=1e-6)
    assert not torch.equal(model(x), model(x))
    assert report.converted == [
        "stem",
        "blocks.0.conv1",
        "blocks.0.conv2",
        "blocks.1.conv1",
        "blocks.1.conv2",
        "blocks.1.downsample.0",
        "head",
    ]
    assert report.left["blocks.1.downsample.1"] == "BatchNorm2d is converted with norms=True"


def test_converted_resnet_learns_and_predicts():
    x, labels = images()
    model = ResNet()
    zm.make_stochastic_(model, posterior=SLIGHTLY_NOISY)
    assert_learns(model, x, labels)
    assert_probabilities(model, x, 3)
    assert model.training


def test_resnet_converted_to_variance_layers_learns():
    x, labels = images()
    model = ResNet()
    zm.make_stochastic_(model, posterior=zm.ZeroMean, where=lambda name, module: "blocks.1" in name)
    torch.testing.assert_close(zm.kl_divergence(model), torch.tensor(0.0))
    assert_learns(model, x, labels)


@pytest.mark.parametrize("decoder_first", [False, True])
def test_converted_transformer_keeps_its_outputs_as_means(decoder_first):
    x = tokens()
    model = Transformer(decoder_first).eval()
    before = model(x).detach()  # With gradients, hence not by the fused path.
    zm.make_stochastic_(model, posterior=SLIGHTLY_NOISY)
    seen = x != PADDING  # What stands at padded positions is nobody's business.
    torch.testing.assert_close(mean_output(model, x)[seen], before[seen], rtol=1e-6, atol=1e-6)
    with zm.sampling(model, zm.mean):
        with_gradients = model(x)
    assert with_gradients.requires_grad
    torch.testing.assert_close(with_gradients[seen], before[seen], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
def test_converted_transformer_draws_in_its_feed_forward_layers_in_eval_mode(grad):
    model = Transformer().eval()
    zm.make_stochastic_(
        model, posterior=SLIGHTLY_NOISY, where=lambda name, module: "linear" in name
    )
    with torch.set_grad_enabled(grad):
        assert not torch.equal(model(tokens()), model(tokens()))


def test_transformer_attention_is_converted_as_a_whole_but_not_a_class_of_ones_own():
    class OwnAttention(nn.MultiheadAttention):
        pass

    model = Transformer()
    model.own = OwnAttention(8, 2)
    report = zm.make_stochastic_(model)
    assert type(model.encoder.layers[0].self_attn) is zm.MultiheadAttention
    assert "encoder.layers.0.self_attn" in report.converted
    assert not [name for name in report.converted if name.endswith("out_proj")]
    assert type(model.own.out_proj) is not zm.Linear
    assert report.left["own"] == "OwnAttention has no stochastic twin"
    assert report.left["own.out_proj"] == "nn.MultiheadAttention reads its weight directly"
    assert "encoder.layers.0.linear1" in report.converted


def test_converted_transformer_learns_and_predicts():
    x = tokens()
    model = Transformer()
    zm.make_stochastic_(model, posterior=SLIGHTLY_NOISY)
    assert_learns(model, x, x)
    assert model.decoder.weight is model.embedding.weight
    assert_probabilities(model, x, VOCABULARY)


@pytest.mark.parametrize("decoder_first", [False, True])
@pytest.mark.parametrize("sampler", [zm.local, zm.weight])
def test_padding_row_of_a_tied_embedding_has_no_noise(decoder_first, sampler):
    model = Transformer(decoder_first)
    zm.make_stochastic_(model, posterior=SLIGHTLY_NOISY, sampler=sampler)
    padded = torch.full((3,), PADDING)
    assert torch.equal(model.embedding(padded), torch.zeros(3, 16))
    assert model.embedding(torch.full((3,), 1)).std() > 0


def test_tied_posterior_counts_once_in_the_kl_and_in_the_parameters():
    model = Transformer()
    zm.make_stochastic_(model, posterior=SLIGHTLY_NOISY, prior=zm.Normal(1.0))
    assert model.embedding.weight is model.decoder.weight
    layers = stochastic_modules(model)
    once = sum(layer.kl() for name, layer in layers.items() if name != "decoder")
    torch.testing.assert_close(zm.kl_divergence(model), once)
    assert sum(1 for p in model.parameters() if p.shape == (VOCABULARY, 16)) == 2


def test_state_dict_of_a_converted_model_names_each_parameter_once():
    plain = Tagger()
    weights = {name for name in plain.state_dict() if "weight" in name}
    assert {"embedding.weight", "head.weight", "lstm.weight_hh_l0_reverse"} < weights
    expected = set(plain.state_dict()) - weights
    expected |= {f"{name}.{p}" for name in weights for p in ("mean", "log_variance")}
    zm.make_stochastic_(plain, posterior=zm.Additive)
    state = plain.state_dict()
    assert set(state) == expected
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)


def test_converted_tagger_keeps_its_outputs_as_means_learns_and_predicts():
    x = tokens()
    model = Tagger().eval()
    before = model(x).detach()
    report = zm.make_stochastic_(model, posterior=SLIGHTLY_NOISY)
    assert report.converted == ["embedding", "lstm", "head"]
    torch.testing.assert_close(mean_output(model, x), before, rtol=1e-6, atol=1e-6)
    assert_learns(model, x, x % 3)
    assert_probabilities(model, x, 3)


# One layer at a time.


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 4), (2, 5, 3)),
        (nn.Linear(3, 4, bias=False), (2, 3)),
        (nn.Conv1d(4, 6, 3, stride=2, groups=2), (2, 4, 9)),
        (nn.Conv2d(2, 3, (3, 5), padding=(1, 2), dilation=(2, 1)), (2, 2, 9, 8)),
        (nn.Conv2d(2, 3, (2, 4), padding="same", dilation=(1, 2)), (2, 2, 9, 8)),
        (nn.Conv2d(2, 3, (3, 1), padding=(1, 0), padding_mode="circular"), (2, 2, 5, 4)),
        (nn.Conv2d(2, 4, 3, padding="valid", padding_mode="reflect", groups=2), (2, 2, 5, 6)),
        (nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 2, 1), bias=False), (2, 2, 3, 4, 5)),
        (nn.ConvTranspose2d(4, 6, (2, 3), 2, 1, 1, groups=2), (2, 4, 3, 4)),
    ],
)
@pytest.mark.parametrize("posterior", [zm.Additive, partial(zm.Multiplicative, share="neuron")])
@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
def test_geometry_survives_the_conversion_there_and_back(layer, shape, posterior):
    x = torch.randn(shape)
    model = nn.Sequential(copy.deepcopy(layer))
    zm.make_stochastic_(model, posterior=posterior)
    torch.testing.assert_close(mean_output(model, x), layer(x), rtol=1e-6, atol=1e-6)
    plain = zm.to_deterministic(model)
    assert str(plain[0]) == str(layer)
    torch.testing.assert_close(plain(x), layer(x), rtol=1e-6, atol=1e-6)


def test_zero_mean_takes_the_magnitudes_of_the_weights_as_scales():
    linear = nn.Linear(3, 4)
    model = nn.Sequential(linear)
    zm.make_stochastic_(model, posterior=zm.ZeroMean)
    torch.testing.assert_close(model[0].weight.scale, linear.weight.abs())
    assert model[0].bias is linear.bias


@pytest.mark.parametrize("build", [ResNet, Tagger, Transformer])
def test_default_keeps_predictions(build):
    """Layers of very different sizes, recurrent ones and attention included."""
    model = build().eval()
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.dim() > 1):
            parameter.mul_(10.0 ** (i % 3 - 1))
    x = images()[0] if build is ResNet else tokens()
    before = model(x).detach()  # With gradients, hence not by torch's fused path.
    report = zm.make_stochastic_(model)
    assert report.converted
    assert report.keeps_predictions
    assert all(0.01 < noise < 0.03 for noise in report.noise.values())
    after = torch.stack([model(x) for _ in range(20)]).detach()  # In eval mode: without Dropout.
    assert (after - before).square().mean().sqrt() < 0.1 * before.std()
    assert (after.std(0) > 0).any()
    assert all(m.weight.has_mean for m in zm.stochastic_layers(model).values())


def test_report_says_when_predictions_change():
    def converted(**options):
        model = nn.Sequential(nn.Linear(30, 40))
        return zm.make_stochastic_(model, **options)

    quiet = converted()
    assert quiet.keeps_predictions
    assert "0.018 of its weights" in str(quiet)
    variance = converted(posterior=zm.ZeroMean)
    assert not variance.keeps_predictions
    assert "mean is zero" in str(variance)
    assert "train" in str(variance)
    loud = converted(posterior=partial(zm.Additive, log_variance=-2.0))
    assert not loud.keeps_predictions
    assert "changes predictions" in str(loud)
    assert loud.noise["0"] == pytest.approx(math.exp(-1.0) * 30**0.5 * 3**0.5, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_initial_noise_relative_to_each_weight(dtype):
    weight = torch.randn(20, 30).to(dtype) * 0.1
    posterior = zm.Additive((20, 30), log_alpha=-4.0, dtype=dtype)
    posterior.set_weight_(weight)
    large = weight.abs() > 0.02 * weight.float().square().mean().sqrt()
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    torch.testing.assert_close(
        posterior.log_alpha_per_weight()[large].float(),
        torch.full((int(large.sum()),), -4.0),
        rtol=0,
        atol=tolerance,
    )
    posterior.set_weight_(torch.zeros(20, 30))
    assert posterior.log_variance.isfinite().all()
    fresh = zm.Additive((20, 30), log_alpha=-4.0)
    assert fresh.log_alpha_per_weight().median().item() == pytest.approx(-4.0, abs=1e-4)
    with pytest.raises(ValueError, match=r"either log_variance.*or log_alpha"):
        zm.Additive((2, 3), log_variance=-3.0, log_alpha=-3.0)


def test_initial_noise_is_the_posteriors_to_say():
    model = nn.Sequential(nn.Linear(3, 4))
    zm.make_stochastic_(model, posterior=partial(zm.Multiplicative, share="neuron", log_alpha=-1.5))
    assert torch.equal(model[0].weight.log_alpha, torch.full((4,), -1.5))


def test_prior_and_sampler_reach_every_layer():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    zm.make_stochastic_(model, posterior=zm.Additive, prior=zm.ARD(), sampler=zm.flipout)
    assert all(m.prior == zm.ARD() and m.sampler is zm.flipout for m in model)


def test_shared_module_is_replaced_wherever_it_stands():
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": shared})
    report = zm.make_stochastic_(model)
    assert isinstance(model["b"], zm.Linear)
    assert model["a"][0] is model["b"]
    assert report.converted == ["a.0"]


def test_frozen_weights_stay_frozen():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    zm.make_stochastic_(model, posterior=zm.Additive)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"0.weight.mean", "0.weight.log_variance"}
    plain = zm.to_deterministic(model)
    assert {name for name, p in plain.named_parameters() if not p.requires_grad} == {"0.weight"}


def test_dtype_device_and_mode_are_kept():
    model = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 2, device="meta"))
    model[0].eval()
    zm.make_stochastic_(model, posterior=zm.Additive)
    assert model[0].weight.dtype == torch.float64
    assert model[1].weight.device.type == "meta"
    assert [module.training for module in model] == [False, True]


def test_hooks_survive_there_and_back_and_can_be_removed():
    model = nn.Sequential(nn.Linear(3, 4))
    calls = []
    handles = [
        model[0].register_forward_hook(lambda *_: calls.append("forward")),
        model[0].register_forward_pre_hook(lambda *_: calls.append("before")),
        model[0].register_full_backward_hook(lambda *_: calls.append("backward")),
    ]
    zm.make_stochastic_(model)
    model(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert calls == ["before", "forward", "backward"]
    zm.to_deterministic(model, "sample")(torch.ones(1, 3)).sum()
    assert calls[3:] == ["before", "forward"]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 3))
    assert len(calls) == 5


def test_predicate_selects_by_name_and_module():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    report = zm.make_stochastic_(model, where=lambda n, m: n != "0" and m.out_features == 4)
    assert report.converted == ["1"]
    assert report.left == {"0": "not selected", "2": "not selected"}
    assert type(model[0]) is nn.Linear


def test_already_stochastic_layers_are_left():
    variance_layer = zm.Linear(3, 4)
    model = nn.Sequential(variance_layer, nn.Linear(4, 2))
    report = zm.make_stochastic_(model, posterior=zm.Additive)
    assert model[0] is variance_layer
    assert report.left == {"0": "already stochastic"}
    with pytest.raises(ValueError, match=r"Nothing to convert.*0: already stochastic; 1: already"):
        zm.make_stochastic_(model)


def test_report_reads_line_by_line():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    report = zm.make_stochastic_(model)
    first, second = str(report).splitlines()
    assert first.startswith("converted 0: noise 0.018")
    assert second == "left 1: BatchNorm1d is converted with norms=True"


class WithToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(3, 2)


def test_report_names_the_model_itself():
    report = zm.make_stochastic_(WithToken())
    assert str(report).splitlines()[1] == "left the model: WithToken has no stochastic twin"


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (parametrizations.weight_norm(nn.Linear(3, 4)), "remove the parametrization first"),
        (parametrizations.weight_norm(nn.Linear(3, 4, bias=False)), "the parametrization first"),
        (prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5), "its weight is not a parameter"),
        (nn.Embedding(3, 4, max_norm=1.0), "Embedding with max_norm"),
        (nn.Embedding(3, 4, sparse=True), "Embedding with max_norm, sparse"),
        (nn.Embedding(3, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.Bilinear(3, 4, 5), "Bilinear has no stochastic twin"),
    ],
)
def test_layer_whose_weight_cannot_be_taken_over_is_left_with_a_reason(layer, reason):
    model = nn.Sequential(layer, nn.Linear(4, 2))
    report = zm.make_stochastic_(model)
    assert model[0] is layer
    assert report.converted == ["1"]
    assert list(report.left) == ["0"]
    assert reason in report.left["0"]


# Refusals, which leave the model as it was.


def assert_refuses(model, sentence, error=ValueError, **options):
    modules, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=sentence):
        zm.make_stochastic_(model, **options)
    assert dict(model.named_modules()) == modules
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], equal_nan=True)


def test_nothing_to_convert_is_refused_with_the_reasons():
    assert_refuses(nn.Sequential(nn.ReLU()), r"Nothing to convert.*\(no parameters\); check where=")
    assert_refuses(nn.Sequential(nn.RNN(2, 3)), "0: RNN has no stochastic twin")
    model = nn.Sequential(nn.Linear(2, 3))
    assert_refuses(model, "0: not selected", where=lambda name, module: False)
    assert_refuses(nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 3))), "0: .*parametriz")
    assert_refuses(zm.Linear(2, 3), "the model: already stochastic")


def test_model_that_is_itself_a_layer_is_refused():
    assert_refuses(nn.Conv2d(2, 3, 1), "is itself a Conv2d.*nn.Sequential, or build a zm.Conv2d")


def test_half_a_tie_is_refused():
    select_decoder = {"where": lambda name, module: name == "decoder"}
    sentence = "embedding shares its weight with a layer to convert.*select both, neither, or untie"
    assert_refuses(Transformer(), sentence, **select_decoder)


def test_weight_that_the_model_holds_itself_is_refused():
    model = WithToken()
    model.reused = model.head.weight
    assert_refuses(model, "The model shares its weight with a layer to convert")


@pytest.mark.parametrize("decoder_first", [False, True])
def test_alpha_by_neuron_on_a_tied_embedding_is_refused(decoder_first):
    by_neuron = partial(zm.Multiplicative, share="neuron")
    sentence = "output units lie along another dimension.*use share='layer' or 'weight'"
    assert_refuses(Transformer(decoder_first), sentence, posterior=by_neuron)


def test_tied_embeddings_of_different_padding_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Embedding(5, 3, padding_idx=1))
    model[1].weight = model[0].weight
    assert_refuses(model, "1 shares its weight with an Embedding of another padding_idx")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_refused(value):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight[0, 0] = value
    assert_refuses(model, "The weight of 1 must be finite.*load a sound checkpoint")


def test_pair_of_sampler_and_noise_that_does_not_fit_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    bernoulli = partial(zm.ZeroMean, noise=zm.rademacher)
    assert_refuses(model, "zm.local needs normal noise", posterior=bernoulli, sampler=zm.local)
    assert_refuses(model, "KL of .* needs normal", posterior=bernoulli, prior=zm.LogUniform())
    assert_refuses(model, "sampler must be a function", TypeError, sampler="weights")


# Back to deterministic models.


def test_deterministic_mean_is_mean_propagation():
    x, _ = images()
    model = trained(ResNet(), x)
    zm.make_stochastic_(model, posterior=SLIGHTLY_NOISY)
    plain = zm.to_deterministic(model)
    torch.testing.assert_close(plain(x), mean_output(model, x))
    assert not any(isinstance(m, zm.StochasticLayer | zm.Posterior) for m in plain.modules())
    assert set(plain.state_dict()) == set(ResNet().state_dict())
    assert zm.stochastic_layers(model)


def test_deterministic_mean_of_a_transformer_is_mean_propagation_with_its_tie():
    x = tokens()
    model = Transformer().eval()
    zm.make_stochastic_(model, posterior=SLIGHTLY_NOISY)
    plain = zm.to_deterministic(model)
    assert plain.decoder.weight is plain.embedding.weight
    torch.testing.assert_close(plain(x)[x != PADDING], mean_output(model, x)[x != PADDING])


def test_changing_the_deterministic_copy_leaves_the_model():
    model = nn.Sequential(zm.Linear(3, 4, posterior=zm.Additive))
    before = copy.deepcopy(model.state_dict())
    for parameter in zm.to_deterministic(model).parameters():
        parameter.data.zero_()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_deterministic_sample_is_one_draw_for_the_whole_batch():
    model = nn.Sequential(zm.Linear(3, 500), nn.ReLU(), zm.Linear(500, 2))
    plain = zm.to_deterministic(model, "sample")
    same = torch.randn(1, 3).expand(4, 3)
    outputs = plain(same)
    torch.testing.assert_close(outputs, outputs[:1].expand(4, 2))
    assert torch.equal(plain(same), outputs)
    assert not torch.equal(zm.to_deterministic(model, "sample")(same), outputs)
    standardized = plain[0].weight / model[0].weight.scale
    count = standardized.numel()
    assert abs(standardized.mean()) < 4 / count**0.5
    assert abs(standardized.square().mean() - 1) < 4 * (2 / count) ** 0.5


def test_deterministic_sample_of_a_tied_weight_is_tied():
    model = Transformer()
    zm.make_stochastic_(model)
    plain = zm.to_deterministic(model, "sample")
    assert plain.decoder.weight is plain.embedding.weight
    assert torch.equal(plain.embedding.weight[PADDING], torch.zeros(16))


def test_zero_mean_layer_has_no_deterministic_mean():
    model = nn.Sequential(zm.Linear(3, 4, posterior=zm.Additive), zm.Linear(4, 2))
    with pytest.raises(ValueError, match=r"1 is a zero-mean layer.*weights='sample'"):
        zm.to_deterministic(model)
    with pytest.raises(ValueError, match="the model is a zero-mean layer"):
        zm.to_deterministic(model[1])
    with pytest.raises(ValueError, match="weights must be one of mean, sample, got 'median'"):
        zm.to_deterministic(model, "median")


def test_layer_by_itself_becomes_a_plain_layer():
    layer = zm.Embedding(5, 3, padding_idx=-1, posterior=zm.Additive)
    plain = zm.to_deterministic(layer)
    assert type(plain) is nn.Embedding
    assert plain.padding_idx == 4
    assert torch.equal(plain.weight, layer.weight.mean)


# BatchNorm.


def batches(count=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 3, generator=generator) * 2 + 1 for _ in range(count)]


def test_recalibrated_statistics_are_those_of_the_batches():
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Linear(3, 2)).eval()
    assert zm.recalibrate_batchnorm_(model, [(x, None) for x in batches()]) == 4
    mean = torch.stack([x.mean(0) for x in batches()]).mean(0)
    variance = torch.stack([x.var(0) for x in batches()]).mean(0)
    torch.testing.assert_close(model[0].running_mean, mean)
    torch.testing.assert_close(model[0].running_var, variance)
    assert model[0].momentum == 0.3
    assert not any(module.training for module in model.modules())


def test_recalibration_takes_a_tensor_or_the_first_batches_of_an_iterator():
    model = nn.Sequential(nn.BatchNorm1d(3))
    assert zm.recalibrate_batchnorm_(model, batches()[0]) == 1
    torch.testing.assert_close(model[0].running_mean, batches()[0].mean(0))
    source = iter(batches())
    assert zm.recalibrate_batchnorm_(model, source, max_batches=2) == 2
    torch.testing.assert_close(model[0].running_mean, torch.cat(batches()[:2]).mean(0))
    assert torch.equal(next(source), batches()[2])


def test_recalibration_sees_the_noise_of_the_model():
    model = nn.Sequential(zm.Linear(3, 2, bias=False), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model += nn.Sequential(nn.BatchNorm1d(2, affine=False))
    x = torch.ones(20_000, 3)
    model.train()
    model[0].eval()
    zm.recalibrate_batchnorm_(model, x)
    variance = model[0].weight.scale.square().sum(1)
    error = 4 * variance * (2 / len(x)) ** 0.5
    assert ((model[1].running_var - variance).abs() < error).all()
    # Dropout doubles the variance; the fourth moment of its output is 24, of its square 24 − 4.
    assert ((model[3].running_var - 2).abs() < 4 * (20 / len(x)) ** 0.5).all()
    assert [m.training for m in model] == [False, True, True, True]


def broken_batches():
    yield batches()[0]
    raise RuntimeError("the disk is gone")


@pytest.mark.parametrize(
    ("source", "error", "sentence"),
    [
        (broken_batches(), RuntimeError, "the disk is gone"),
        ([], ValueError, "needs at least one batch, got none"),
        ([torch.ones(4, 7)], RuntimeError, "running_mean"),
    ],
)
def test_failed_recalibration_restores_everything(source, error, sentence):
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Linear(3, 2))
    model(batches()[1])
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=sentence):
        zm.recalibrate_batchnorm_(model, source)
    assert model[0].momentum == 0.3
    assert [m.training for m in model.modules()] == [True, True, False]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_model_without_running_statistics_is_refused():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="no BatchNorm with running statistics"):
        zm.recalibrate_batchnorm_(model, batches())


class InAList(nn.Module):
    """Its forward function finds its layers in containers of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.order = [self.a, {"then": (self.b,)}]

    def forward(self, x):
        return self.order[1]["then"][0](self.order[0](x))


def test_layers_in_plain_containers_are_converted_too():
    model, x = InAList(), torch.randn(2, 3)
    expected = model(x)
    zm.make_stochastic_(model, posterior=zm.Additive)
    assert model.order[0] is model.a
    assert model.order[1]["then"][0] is model.b
    assert (model(x) != model(x)).any()
    plain = zm.to_deterministic(model)
    torch.testing.assert_close(plain(x), expected)
    assert not zm.stochastic_layers(plain)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, z):
        return self.norm(x + z)


@pytest.mark.parametrize("form", ["mapping", "tuple"])
def test_recalibration_takes_several_inputs(form):
    x, z = torch.randn(50, 3), torch.randn(50, 3) + 2
    batch = {"x": x, "z": z} if form == "mapping" else ((x, z), None)
    model = Sum()
    assert zm.recalibrate_batchnorm_(model, [batch]) == 1
    torch.testing.assert_close(model.norm.running_mean, (x + z).mean(0))


def test_gates_are_additive_unless_another_posterior_is_asked_for():
    model = nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 2))
    weight = model[0].weight_hh_l0.detach().clone()
    zm.make_stochastic_(model)
    assert isinstance(model[0].weight_hh_l0, zm.Additive)
    assert torch.equal(model[0].weight_hh_l0.mean, weight)
    model = nn.Sequential(nn.GRU(3, 4))
    zm.make_stochastic_(model, posterior=zm.ZeroMean)
    assert isinstance(model[0].weight_hh_l0, zm.ZeroMean)


def test_recalibration_passes_over_a_last_batch_of_one_object():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), zm.Linear(4, 8), nn.BatchNorm1d(8))
    data = torch.randn(41, 4)
    assert zm.recalibrate_batchnorm_(model, data.split(10)) == 4
    means = torch.stack([batch.mean(0) for batch in data[:40].split(10)])
    torch.testing.assert_close(model[0].running_mean, means.mean(0))
    with pytest.raises(ValueError, match="batches of one example"):
        zm.recalibrate_batchnorm_(model, data[:2].split(1))
    torch.testing.assert_close(model[0].running_mean, means.mean(0))


def test_a_stochastic_layer_put_into_an_encoder_by_hand_works_in_eval_mode():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.linear1 = zm.Linear(8, 16)
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        assert layer.eval()(x).shape == x.shape
        with zm.sampling(layer, zm.mean):
            torch.testing.assert_close(layer(x), layer(x))
    with pytest.raises(TypeError, match=r"linear needs a tensor.*call the layer"):
        F.linear(x, layer.linear1.weight)


def test_masks_of_torch_prune_become_zeros_of_a_deterministic_copy():
    model = nn.Sequential(zm.Linear(3, 4, posterior=zm.Additive), nn.Linear(4, 2))
    prune.l1_unstructured(model[1], "weight", 0.5)
    plain = zm.to_deterministic(model)
    torch.testing.assert_close(plain[1].weight, model[1].weight)
    assert int((plain[1].weight == 0).sum()) == 4
    assert "weight_mask" in dict(model[1].named_buffers())


def test_a_layer_of_zeros_becomes_a_variance_layer_that_can_learn():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    nn.init.zeros_(model[2].weight)
    before = model[0].weight.detach().clone()
    zm.make_stochastic_(model, posterior=zm.ZeroMean)
    torch.testing.assert_close(model[0].weight.scale, before.abs())
    assert (model[2].weight.scale != 0).all()


def test_a_bias_with_a_mask_of_torch_prune_is_left():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    prune.l1_unstructured(model[1], "bias", 0.5)
    assert "has masked its bias" in zm.make_stochastic_(model).left["1"]
