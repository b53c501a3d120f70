"""LSTM and GRU with random weights: against torch's, and over sequences, samples and devices."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import zeromean as zm
import zeromean.prediction.monte_carlo
from zeromean.prediction.replay import Replay

KINDS = ("LSTM", "GRU")
every_kind = pytest.mark.parametrize("kind", KINDS)
GEOMETRIES = [
    dict(zip(("num_layers", "bias", "batch_first", "bidirectional"), values, strict=True))
    for values in itertools.product((1, 2), (True, False), (True, False), (True, False))
]
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
POSTERIORS = {
    "Additive": partial(zm.Additive, log_variance=-3.0),
    "ZeroMean": zm.ZeroMean,
    "ZeroMean-rademacher": partial(zm.ZeroMean, noise=zm.rademacher),
    "Multiplicative-layer": partial(zm.Multiplicative, log_alpha=-1.0),
    "Multiplicative-neuron": partial(zm.Multiplicative, share="neuron", log_alpha=-1.0),
}
every_posterior = pytest.mark.parametrize("posterior", POSTERIORS)


def pair(kind, **geometry):
    """torch's layer and its twin with the same weights, made by conversion."""
    plain = getattr(nn, kind)(4, 6, **geometry)
    model = nn.Sequential(copy.deepcopy(plain))
    zm.make_stochastic_(model, posterior=partial(zm.Additive, log_variance=-3.0))
    return plain, model[0]


def build(kind, posterior="Additive", **options):
    return getattr(zm, kind)(4, 6, posterior=POSTERIORS[posterior], **options)


def state_for(kind, layer, num_objects=3):
    shape = (layer.num_layers * layer.num_directions, num_objects, 6)
    state = tuple(torch.randn(shape) for _ in range(layer.num_states))
    return state if kind == "LSTM" else state[0]


def packed():
    return pack_sequence([torch.randn(n, 4) for n in (2, 5, 3)], enforce_sorted=False)


def assert_equal(actual, expected, **tolerance):
    if isinstance(actual, PackedSequence):
        actual, expected = actual.data, expected.data
    torch.testing.assert_close(actual, expected, **tolerance)


@every_kind
@every_geometry
def test_mean_propagation_is_torchs_layer(kind, geometry):
    plain, layer = pair(kind, **geometry)
    with zm.sampling(layer, zm.mean):
        for x in (torch.randn(3, 5, 4), torch.randn(5, 4), packed()):
            for output, expected in zip(layer(x), plain(x), strict=True):
                assert_equal(output, expected, rtol=0, atol=0)
        num_objects = 3 if geometry["batch_first"] else 5
        for x, num in ((torch.randn(3, 5, 4), num_objects), (packed(), 3)):
            state = state_for(kind, layer, num)
            for output, expected in zip(layer(x, state), plain(x, state), strict=True):
                assert_equal(output, expected, rtol=0, atol=0)


@every_kind
@every_geometry
def test_unrolled_under_vmap_is_torchs_layer(kind, geometry):
    plain, layer = pair(kind, **geometry)
    x, sequences = torch.randn(3, 5, 4), packed()
    state = state_for(kind, layer, 3 if geometry["batch_first"] else 5)

    def noisy_zero():
        return 0 * torch.randn(())

    def padded(_):
        return layer(x + noisy_zero(), state)

    def ragged(_):
        output, last = layer(PackedSequence(sequences.data + noisy_zero(), *sequences[1:]))
        return output.data, last

    with zm.sampling(layer, zm.mean):
        for run, expected in ((padded, plain(x, state)), (ragged, plain(sequences))):
            outputs = torch.func.vmap(run, randomness="different")(torch.empty(2))
            first = torch.utils._pytree.tree_map(lambda t: t[0], outputs)
            for actual, wanted in zip(first, expected, strict=True):
                assert_equal(actual, wanted.data if actual is first[0] else wanted)


@every_kind
def test_noise_is_fixed_over_a_sequence_and_shared_by_the_batch(kind):
    layer = build(kind, batch_first=True)
    constant = torch.randn(1, 1, 4).expand(3, 1, 4)
    # With a memory of nothing the output at a step depends on the weights and the input alone.
    outputs, _ = layer(constant)
    torch.testing.assert_close(outputs[0], outputs[1])
    x = torch.randn(2, 7, 4)
    torch.manual_seed(5)
    whole, _ = layer(x)
    torch.manual_seed(5)
    first, state = layer(x[:, :3])
    torch.manual_seed(5)  # The same weights for the rest of the sequence.
    second, _ = layer(x[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert not torch.equal(layer(x)[0], layer(x)[0])


@every_kind
@every_posterior
def test_output_is_torchs_with_weights_drawn_from_the_posteriors(kind, posterior):
    layer = build(kind, posterior, num_layers=2, bidirectional=True)
    x = torch.randn(5, 3, 4)
    plain = getattr(nn, kind)(4, 6, 2, bidirectional=True)
    torch.manual_seed(2)
    output, _ = layer(x)
    torch.manual_seed(2)
    weights = {name: posterior.sample() for name, posterior in layer.posteriors().items()}
    assert weights.keys() == {n for n, _ in plain.named_parameters() if n.startswith("weight")}
    biases = {n: p for n, p in layer.named_parameters() if n.startswith("bias")}
    plain.load_state_dict({**weights, **biases})
    torch.testing.assert_close(output, plain(x)[0])


@every_kind
@every_posterior
def test_trains(kind, posterior):
    layer = build(kind, posterior, num_layers=2, dtype=torch.float64)
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    output, _ = layer(x)
    assert output.dtype == torch.float64
    loss = zm.elbo_loss(output.square().mean(), zm.kl_divergence(layer), num_data=100)
    loss.backward()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@every_kind
def test_gradient_of_the_unrolled_steps_is_that_of_the_kernel(kind):
    layer = build(kind, bidirectional=True, batch_first=True).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x[None],))[0].square().sum()

    with zm.sampling(layer, zm.mean):
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        expected = torch.autograd.grad(layer(x)[0].square().sum(), list(parameters.values())[:1])
    name = next(iter(parameters))
    torch.testing.assert_close(each[name].sum(0), expected[0])


@every_kind
def test_kl_is_the_sum_over_the_weight_matrices(kind):
    layer = build(kind, num_layers=2)
    model = nn.Sequential(layer)
    expected = sum(zm.LogUniform().kl(p) for p in layer.posteriors().values())
    torch.testing.assert_close(zm.kl_divergence(model), expected)
    torch.testing.assert_close(layer.kl(), expected)
    assert zm.kl_by_layer(model).keys() == {"0"}
    assert getattr(zm, kind)(4, 6, prior=None).kl() == 0
    assert build(kind, "ZeroMean-rademacher").prior is None
    assert zm.kl_divergence(build(kind, "ZeroMean")) == 0


@every_kind
def test_state_dict_keys_and_round_trips(kind):
    layer = build(kind, num_layers=2, bidirectional=True)
    plain = layer.plain_twin()
    expected = {
        key
        for name in plain.state_dict()
        for key in ([name] if "bias" in name else [f"{name}.mean", f"{name}.log_variance"])
    }
    assert set(layer.state_dict()) == expected
    fresh = build(kind, num_layers=2, bidirectional=True)
    fresh.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 4)
    torch.manual_seed(1)
    output, _ = layer(x)
    for twin in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.manual_seed(1)
        assert torch.equal(twin(x)[0], output)


@every_kind
def test_initial_weights_are_torchs(kind):
    layer = getattr(zm, kind)(4, 64)
    for posterior in layer.posteriors().values():
        assert isinstance(posterior, zm.Additive)
        assert 0.12 < posterior.mean.abs().max() <= 0.125
    layer.bias_ih_l0.data.fill_(7.0)
    layer.reset_parameters()
    assert layer.bias_ih_l0.abs().max() <= 0.125


@every_kind
@pytest.mark.parametrize("posterior", ["Additive", "ZeroMean", "Multiplicative-neuron"])
def test_monte_carlo_prediction_draws_weights_for_every_sample(kind, posterior):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(3, 4)
            self.recurrent = build(kind, posterior, batch_first=True)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.recurrent(self.embed(x))[0][:, -1])

    model, x = Reader(), torch.randn(2, 5, 3)
    looped = torch.stack([model(x).detach() for _ in range(2000)])
    for chunk_size in (None, 500):
        samples = zm.sample_outputs(model, x, 2000, seed=0, chunk_size=chunk_size)
        assert samples.reshape(2000, -1).unique(dim=0).shape[0] == 2000
        stderr = (samples.var(0) / 1000).sqrt()
        assert ((samples.mean(0) - looped.mean(0)).abs() < 5 * stderr).all()
        torch.testing.assert_close(samples.std(0), looped.std(0), rtol=0.15, atol=0.0)
    means = zm.sample_outputs(model, x, 2, sampler=zm.mean)
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(means, model(x).detach().expand(2, -1, -1))
    for sampler in (zm.local, zm.weight, zm.flipout, "auto"):
        if sampler is not zm.local or "rademacher" not in posterior:
            samples = zm.sample_outputs(model, x, 3, sampler=sampler)
            assert not torch.equal(samples[0], samples[1])


def test_what_comes_before_is_computed_once_in_a_prediction(monkeypatch):
    class Watched(Replay):
        def __init__(self, **options):
            super().__init__(**options)
            replays.append(self)

    replays = []
    monkeypatch.setattr(zeromean.prediction.monte_carlo, "Replay", Watched)
    model = nn.Sequential(nn.Linear(3, 4), build("LSTM"))
    zm.sample_outputs(model, torch.randn(2, 5, 3), 5, select=lambda output: output[0])
    # Unrolled for the first sample and by the kernel for the others, yet the same calls.
    assert len(replays) == 1
    assert replays[0].recorded
    assert replays[0].replayable


@every_kind
def test_dropout_between_layers_is_on_in_training_and_monte_carlo_prediction(kind):
    layer = build(kind, num_layers=2, dropout=0.5)
    x = torch.randn(5, 3, 4)
    with zm.sampling(layer, zm.mean):
        assert torch.equal(layer(x)[0], layer(x)[0])  # Means: Dropout is off as well.
    layer.sampler = zm.mean
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    samples = zm.sample_outputs(layer, x, 2, select=lambda output: output[0])
    assert not torch.equal(samples[0], samples[1])
    assert not layer.training
    with pytest.warns(UserWarning, match="does nothing for num_layers=1"):
        build(kind, dropout=0.5)


@every_kind
def test_compiles_without_graph_breaks(kind, fresh_dynamo):
    layer = build(kind, num_layers=2, bidirectional=True)
    x = torch.randn(4, 3, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.manual_seed(1)
            expected = layer(x)
            torch.manual_seed(1)
            output = compiled(x)
            torch.testing.assert_close(output, expected)
    compiled(x)[0].sum().backward()


@every_kind
@every_posterior
def test_meta_device_dtype_autocast_and_repr(kind, posterior):
    layer = build(kind, posterior, device="meta", dtype=torch.float64)
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert layer(torch.randn(5, 3, 4, device="meta", dtype=torch.float64))[0].shape == (5, 3, 6)
    layer = build(kind, posterior, num_layers=2, batch_first=True)
    assert repr(layer).startswith(f"{kind}(\n  4, 6, num_layers=2, batch_first=True, prior=")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            getattr(nn, kind)(4, 6)(torch.randn(3, 5, 4))
        except RuntimeError as error:
            pytest.skip(f"torch's own {kind} cannot on this CPU: {error}")
        output, _ = layer(torch.randn(3, 5, 4))
    output.float().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@every_kind
@every_geometry
def test_conversion_there_and_back_keeps_the_weights(kind, geometry):
    plain, layer = pair(kind, **geometry)
    restored = zm.to_deterministic(nn.Sequential(layer))[0]
    assert type(restored) is type(plain)
    assert repr(restored) == repr(plain)
    assert restored.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value)
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(restored(x), plain(x), rtol=0, atol=0)
    drawn = zm.to_deterministic(nn.Sequential(layer), "sample")[0]
    assert not torch.equal(drawn.weight_hh_l0, plain.weight_hh_l0)


def test_conversion_keeps_mode_flags_and_ties():
    first, second = nn.GRU(4, 4), nn.GRU(4, 4)
    second.weight_hh_l0 = first.weight_hh_l0
    first.weight_ih_l0.requires_grad_(False)
    model = nn.Sequential(first, second.eval())
    report = zm.make_stochastic_(model, posterior=zm.Additive)
    assert report.converted == ["0", "1"]
    assert model[0].weight_hh_l0 is model[1].weight_hh_l0
    assert not model[0].weight_ih_l0.mean.requires_grad
    assert not model[1].training
    once = sum(zm.LogUniform().kl(p) for p in {*model[0].children(), *model[1].children()})
    torch.testing.assert_close(zm.kl_divergence(model), once)
    assert zm.make_stochastic_(
        nn.Sequential(model, nn.Linear(2, 2)), posterior=zm.Additive
    ).left == {"0.0": "already stochastic", "0.1": "already stochastic"}


def test_unsuitable_recurrent_layers_are_left_with_a_reason():
    model = nn.Sequential(nn.LSTM(4, 6, proj_size=3), nn.RNN(4, 6), nn.Linear(2, 2))
    report = zm.make_stochastic_(model)
    assert report.left == {
        "0": "LSTM with proj_size has no stochastic twin",
        "1": "RNN has no stochastic twin",
    }
    with pytest.raises(ValueError, match=r"itself a LSTM.*zm\.LSTM"):
        zm.make_stochastic_(nn.LSTM(4, 6))
    broken = nn.Sequential(nn.GRU(2, 3))
    broken[0].weight_hh_l0.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="must be finite"):
        zm.make_stochastic_(broken)


def test_zero_mean_recurrent_layer_has_no_mean_weights():
    model = nn.Sequential(build("LSTM", "ZeroMean"))
    with pytest.raises(ValueError, match=r"0\.weight_ih_l0 is a zero-mean layer"):
        zm.to_deterministic(model)


@every_kind
def test_wrong_inputs_and_settings_are_refused(kind):
    layer = build(kind)
    with pytest.raises(ValueError, match=r"needs an input of shape \(T, N, 4\) or \(T, 4\), got"):
        layer(torch.randn(5, 3, 7))
    with pytest.raises(ValueError, match=r"initial state\(s\) of shape \(1, 3, 6\)"):
        layer(torch.randn(5, 3, 4), state_for(kind, layer, 2))
    with pytest.raises(ValueError, match="hidden_size must be at least 1"):
        getattr(zm, kind)(4, 0)
    with pytest.raises(ValueError, match="dropout must lie between 0 and 1"):
        build(kind, num_layers=2, dropout=1.5)
    with pytest.raises(ValueError, match="needs normal noise, got rademacher"):
        build(kind, "ZeroMean-rademacher", prior=zm.ARD())


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_models_that_flatten_parameters_can_be_converted(kind):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(nn, kind)(4, 5, batch_first=True)

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    model = Tagger()
    zm.make_stochastic_(model, posterior=zm.Additive)
    assert model(torch.randn(2, 6, 4)).shape == (2, 6, 5)
    assert model.rnn.proj_size == 0
