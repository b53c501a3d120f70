import copy
import math
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._functorch import is_batchedtensor
from torch.distributions import Categorical

import zeromean as zm
from zeromean.models.lenet import lenet5_caffe
from zeromean.prediction import chunks
from zeromean.prediction.replay import Replay
from zeromean.prediction.unbatch import take_escaped_


class Counting(nn.Module):
    """An identity that counts its calls and the elements that it was given."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.largest = 0

    def forward(self, x):
        self.calls += 1
        self.largest = max(self.largest, x.numel())
        return x


def network(**options):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), zm.Linear(8, 3, **options))


@pytest.fixture
def x():
    return torch.randn(5, 4)


def test_sample_outputs_has_samples_in_front_and_differs_between_them(x):
    outputs = zm.sample_outputs(network(), x, num_samples=7)
    assert outputs.shape == (7, 5, 3)
    assert not outputs.requires_grad
    assert len({o.sum().item() for o in outputs}) == 7


def test_samples_follow_the_exact_distribution_of_the_last_layer(x):
    model = network(posterior=zm.Additive).double()
    nn.init.constant_(model[2].weight.log_variance, -1.0)
    x = x.double()
    outputs = zm.sample_outputs(model, x, num_samples=20_000)
    hidden = model[:2](x).detach()
    mean, variance = model[2].linear_map().moments(hidden, model[2].weight, model[2].bias)
    mean, variance = mean.detach(), variance.detach()
    assert ((outputs.mean(0) - mean) / (variance / 20_000).sqrt()).abs().max() < 5
    assert (outputs.var(0) / variance - 1).abs().max() < 5 * (2 / 20_000) ** 0.5


def test_predict_proba_is_the_average_of_the_softmax_of_the_same_samples(x):
    model = network()
    probabilities, stderr = zm.predict_proba(model, x, 50, seed=3, return_stderr=True)
    samples = zm.sample_outputs(model, x, 50, seed=3).softmax(-1)
    torch.testing.assert_close(probabilities, samples.mean(0))
    torch.testing.assert_close(stderr, samples.std(0) / math.sqrt(50))
    torch.testing.assert_close(zm.predict_proba(model, x, 50, seed=3), probabilities)


def test_class_dimension_can_be_chosen():
    model = nn.Sequential(zm.Conv2d(2, 3, 1))
    images = torch.randn(4, 2, 5, 5)
    probabilities = zm.predict_proba(model, images, 3, dim=1)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(4, 5, 5))
    assert zm.predictive_uncertainty(model, images, 3, dim=1)[0].shape == (4, 5, 5)


def test_uncertainty_splits_the_entropy_as_torch_distributions_has_it(x):
    model = network()
    uncertainty, stderr = zm.predictive_uncertainty(model, x, 40, seed=1, return_stderr=True)
    samples = zm.sample_outputs(model, x, 40, seed=1).softmax(-1)
    total = Categorical(samples.mean(0)).entropy()
    expected = Categorical(samples).entropy().mean(0)
    torch.testing.assert_close(uncertainty.predictive_entropy, total)
    torch.testing.assert_close(uncertainty.expected_entropy, expected)
    torch.testing.assert_close(uncertainty.mutual_information, total - expected)
    assert (uncertainty.mutual_information >= 0).all()
    streamed = zm.predictive_uncertainty(model, x, 40, seed=1)
    for whole, part in zip(uncertainty, streamed, strict=True):
        torch.testing.assert_close(whole, part)
    assert all((error > 0).all() for error in stderr)


def test_standard_errors_cover_the_spread_of_repeated_predictions(x):
    model = network()
    repeats = [
        zm.predictive_uncertainty(model, x, 200, seed=s, return_stderr=True) for s in range(60)
    ]
    for field in range(3):
        values = torch.stack([u[field] for u, _ in repeats])
        errors = torch.stack([e[field] for _, e in repeats]).mean(0)
        ratio = values.std(0) / errors
        assert (ratio - 1).abs().max() < 5 / math.sqrt(2 * 60)


def test_moments_split_the_variance_and_match_the_exact_linear_model(x):
    model = nn.Sequential(zm.Linear(4, 2, posterior=zm.Additive)).double()
    nn.init.constant_(model[0].weight.log_variance, -1.0)
    likelihood = zm.GaussianLikelihood(2, noise_variance=0.3, dtype=torch.float64)
    x = x.double()
    moments, stderr = zm.predict_moments(
        model, x, 20_000, likelihood=likelihood, seed=0, return_stderr=True
    )
    mean, variance = model[0].linear_map().moments(x, model[0].weight, model[0].bias)
    assert ((moments.mean - mean.detach()) / stderr.mean).abs().max() < 5
    assert ((moments.epistemic - variance.detach()) / stderr.epistemic).abs().max() < 5
    torch.testing.assert_close(moments.aleatoric, torch.full((5, 2), 0.3, dtype=torch.float64))
    torch.testing.assert_close(moments.variance, moments.aleatoric + moments.epistemic)


def test_heteroscedastic_moments_average_the_predicted_noise(x):
    model = nn.Sequential(zm.Linear(4, 4))
    likelihood = zm.HeteroscedasticGaussianLikelihood()
    moments = zm.predict_moments(model, x, 30, likelihood=likelihood, seed=2)
    samples = zm.sample_outputs(model, x, 30, seed=2)
    torch.testing.assert_close(moments.mean, samples[..., :2].mean(0))
    torch.testing.assert_close(moments.epistemic, samples[..., :2].var(0))
    torch.testing.assert_close(moments.aleatoric, samples[..., 2:].exp().mean(0))


def test_without_a_likelihood_the_aleatoric_variance_is_zero(x):
    assert (zm.predict_moments(network(), x, 4).aleatoric == 0).all()


def test_seed_reproduces_and_leaves_the_global_generator_alone(x):
    model = network()
    state = torch.get_rng_state()
    first = zm.sample_outputs(model, x, 9, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(zm.sample_outputs(model, x, 9, seed=5), first)
    assert not torch.equal(zm.sample_outputs(model, x, 9, seed=6), first)


def test_without_a_seed_the_global_generator_decides(x):
    model = network()
    torch.manual_seed(1)
    first = zm.sample_outputs(model, x, 9)
    torch.manual_seed(1)
    assert torch.equal(zm.sample_outputs(model, x, 9), first)


def test_sampler_can_be_chosen_and_is_restored(x):
    model = network(posterior=zm.Additive)
    outputs = zm.sample_outputs(model, x, 3, sampler=zm.mean)
    assert torch.equal(outputs[0], outputs[1])
    assert model[2].sampler is zm.local
    doubled = zm.sample_outputs(
        nn.Sequential(zm.Linear(4, 2, bias=False)), torch.cat([x, 2 * x]), 6, sampler=zm.weight
    )
    torch.testing.assert_close(doubled[:, 5:], 2 * doubled[:, :5])
    assert not torch.allclose(doubled[0], doubled[1])


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_chunks_hold_as_many_samples_as_asked_and_all_are_drawn(x, chunk_size):
    counting = Counting()
    model = nn.Sequential(zm.Linear(4, 6), counting, nn.Linear(6, 3))
    outputs = zm.sample_outputs(model, x, 7, chunk_size=chunk_size)
    assert outputs.shape == (7, 5, 3)
    assert counting.calls == math.ceil(7 / chunk_size)
    assert len({o.sum().item() for o in outputs}) == 7


def test_memory_is_bounded_whatever_the_number_of_samples(x, monkeypatch):
    monkeypatch.setattr("zeromean.prediction.chunks.ELEMENTS_AT_ONCE", 100)
    counting = Counting()
    model = nn.Sequential(zm.Linear(4, 6), counting, nn.Linear(6, 3))
    zm.predict_proba(model, x, 50)
    assert counting.calls == 1 + math.ceil(49 / 3)  # 3 samples × 30 elements fit into 100


def test_deterministic_prefix_is_computed_once_over_all_chunks(x):
    calls = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 6)
            self.noisy = zm.Linear(6, 3)

        def forward(self, value):
            hidden = torch.tanh(self.first(value))
            return self.noisy(hidden)

    class CountTanh(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.tanh, torch.Tensor.square):
                calls.append(func)
            return func(*args, **(kwargs or {}))

    model = Model()
    with CountTanh():
        outputs = zm.sample_outputs(model, x, 10, chunk_size=2)
    # tanh of the prefix once; squares of the input and of the scale (the moments) once each.
    assert calls.count(torch.tanh) == 1
    assert calls.count(torch.Tensor.square) == 2
    assert len({o.sum().item() for o in outputs}) == 10


def test_replayed_samples_have_the_moments_of_a_plain_loop():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        zm.Conv2d(4, 4, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        zm.Linear(4 * 4, 3),
    ).eval()
    images = torch.randn(2, 1, 8, 8)
    fast = zm.sample_outputs(model, images, 4000, seed=0)
    with torch.no_grad():
        loop = torch.stack([model(images) for _ in range(4000)])
    error = (fast.mean(0) - loop.mean(0)) / (2 * loop.var(0) / 4000).sqrt()
    assert error.abs().max() < 4.5
    assert (fast.std(0) / loop.std(0) - 1).abs().max() < 0.1


def test_in_place_write_behind_the_noise_is_not_replayed(x):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.noisy = zm.Linear(4, 4, posterior=zm.Additive)

        def forward(self, value):
            hidden = value + 1  # noise-free,
            noisy = self.noisy(hidden)  # read by noise,
            hidden.mul_(0)  # and written afterwards
            return noisy + hidden

    model = Model()
    nn.init.constant_(model.noisy.weight.log_variance, -40.0)
    expected = model.noisy(x + 1)
    for output in zm.sample_outputs(model, x, 5, chunk_size=1):
        torch.testing.assert_close(output, expected.detach())


def test_operators_that_begin_like_in_place_ones_are_replayed(x):
    mask = torch.tensor([True, False, True, True])

    def run():
        noisy = torch.randn(4) * mask  # Noise has read the mask,
        return noisy * ~mask  # which is read again, and not written.

    replay = Replay()
    with replay:
        torch.func.vmap(lambda _: run(), randomness="different")(torch.empty(2))
    assert replay.replayable


def test_model_that_branches_from_call_to_call_is_not_replayed(x):
    class Model(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.noisy = zm.Linear(4, 4)

        def forward(self, value):
            self.calls += 1
            hidden = torch.tanh(value) if self.calls % 2 else torch.relu(value)
            return self.noisy(hidden)

    assert zm.sample_outputs(Model(), x, 6, chunk_size=2).shape == (6, 5, 4)


def test_what_vmap_cannot_run_is_looped():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = zm.Embedding(10, 6)
            self.recurrent = nn.LSTM(6, 5, batch_first=True)
            self.head = zm.Linear(5, 4)

        def forward(self, tokens):
            return self.head(self.recurrent(self.embedding(tokens))[0])

    outputs = zm.sample_outputs(Tagger(), torch.randint(10, (3, 7)), 4)
    assert outputs.shape == (4, 3, 7, 4)
    assert len({o.sum().item() for o in outputs}) == 4

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.noisy = zm.Linear(4, 1)

        def forward(self, value):
            hidden = self.noisy(value)
            return hidden if hidden.sum() > 0 else -hidden

    assert (zm.sample_outputs(Branches(), torch.randn(5, 4), 8).sum((1, 2)) > 0).all()


def test_an_error_of_the_model_is_its_own_and_everything_is_restored(x):
    model = nn.Sequential(network(), nn.Dropout(0.3), nn.BatchNorm1d(3)).train()
    model[1].eval()
    broken = nn.Sequential(model, zm.Linear(8, 2))
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"Linear needs an input of shape \(\*, 8\)"):
        zm.sample_outputs(broken, x, 4, sampler=zm.weight, seed=1)
    assert [m.training for m in model] == [True, False, True]
    assert model[0][2].sampler is zm.local
    assert torch.equal(torch.get_rng_state(), state)


def test_batchnorm_uses_running_statistics_and_dropout_stays_on(x):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    outputs = zm.sample_outputs(model, x, 50)
    expected = x / math.sqrt(1 + 1e-5)
    kept = outputs != 0
    torch.testing.assert_close(outputs[kept], (2 * expected).expand(50, -1, -1)[kept])
    assert 0.4 < kept.float().mean() < 0.6
    assert model.training
    assert model[0].num_batches_tracked == 0
    with zm.sampling(model.eval(), zm.mean):
        torch.testing.assert_close(model(x), expected)


def test_mean_sampling_turns_dropout_off_and_back_on(x):
    model = nn.Sequential(network(posterior=zm.Additive), nn.Dropout(0.5)).train()
    with zm.sampling(model, zm.mean):
        assert torch.equal(model(x), model(x))
        assert not model[1].training
    assert model[1].training
    with pytest.raises(RuntimeError, match="stop"), zm.sampling(model, zm.mean):
        raise RuntimeError("stop")
    assert model[1].training
    assert model[0][2].sampler is zm.local


def test_modes_that_are_changed_inside_a_block_are_those_of_the_whole_model():
    model = nn.Sequential(zm.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3))
    for block in (zm.sampling(model.train(), zm.weight), zm.held_noise(model)):
        model.train()
        with block:
            model.eval()
        assert not any(module.training for module in model.modules())
    model.train()
    with zm.sampling(model, zm.mean):
        assert not model[1].training
        model.eval()
    assert all(module.training for module in model.modules())


def test_sampling_refuses_a_sampler_that_does_not_fit_and_changes_nothing():
    model = network(posterior=lambda *a, **k: zm.ZeroMean(*a, noise=zm.uniform, **k))
    with pytest.raises(ValueError, match=r"zm\.local needs normal noise, got uniform"):
        with zm.sampling(model, zm.local):
            pass
    assert model[2].sampler is zm.weight


def test_transformer_dropout_is_on_in_prediction():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).eval()
    outputs = zm.sample_outputs(layer, torch.randn(2, 3, 8), 4)
    assert not torch.allclose(outputs[0], outputs[1])
    assert not layer.training


def test_inputs_can_be_positional_or_by_name_and_outputs_selected():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.noisy = zm.Linear(4, 3)

        def forward(self, left, right):
            return {"scores": self.noisy(left + right), "aux": None}

    left, right = torch.randn(2, 5, 4)
    pick = lambda output: output["scores"]  # noqa: E731
    for inputs in ((left, right), {"left": left, "right": right}):
        assert zm.sample_outputs(Model(), inputs, 3, select=pick).shape == (3, 5, 3)
    with pytest.raises(TypeError, match=r"called logits, got dict of scores, aux; pass select="):
        zm.sample_outputs(Model(), (left, right), 3)


def test_gradients_pass_through_the_samples_on_request(x):
    model = network()
    x.requires_grad_()
    zm.sample_outputs(model, x, 6, differentiable=True, chunk_size=2).square().mean().backward()
    assert x.grad.abs().sum() > 0
    assert model[2].weight.scale.grad.abs().sum() > 0


def test_a_deterministic_model_gives_equal_samples(x):
    outputs = zm.sample_outputs(nn.Linear(4, 2), x, 5)
    assert outputs.shape == (5, 5, 2)
    assert torch.equal(outputs[0], outputs[4])


def test_compiled_model_can_be_predicted_with(x, fresh_dynamo):
    model = torch.compile(network(), fullgraph=True, backend="aot_eager")
    outputs = zm.sample_outputs(model, x, 4)
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: zm.sample_outputs(m, x, 0), "num_samples must be at least 1, got 0"),
        (lambda m, x: zm.sample_outputs(m, x, 2, chunk_size=0), "chunk_size must be at least 1"),
        (
            lambda m, x: zm.predict_proba(m, x, 1, return_stderr=True),
            "return_stderr=True needs num_samples of at least 2, got 1",
        ),
        (lambda m, x: zm.predict_moments(m, x, 1), "predict_moments needs num_samples"),
        (
            lambda m, x: zm.predict_proba(m, x * float("nan")),
            r"must be finite, got 20 NaN or infinite values in a tensor of shape \(5, 4\)",
        ),
        (
            lambda m, x: zm.predict_proba(nn.Sequential(m, nn.Linear(3, 1)), x),
            r"at least 2 classes in dimension -1, got outputs of shape \(5, 1\).*link='sigmoid'",
        ),
    ],
)
def test_bad_input_is_refused(x, call, message):
    with pytest.raises(ValueError, match=message):
        call(network(), x)


def test_non_finite_parameters_are_named(x):
    model = network()
    with torch.no_grad():
        model[2].weight.scale[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"The parameter 2\.weight\.scale is not finite"):
        zm.predict_proba(model, x)


def test_replay_tells_the_size_of_the_noisy_part(x):
    replay = Replay()
    model = network()

    def sample(_):
        with replay:
            return model(x)

    torch.func.vmap(sample, randomness="different")(torch.empty(3))
    assert replay.largest_noisy == 5 * 3


class Remembers(nn.Module):
    """Holds on to its prefix, and counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.noisy = zm.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value):
        self.seen = self.seen + len(value)
        return self.noisy(self.first(value))


def test_nothing_of_the_replay_is_left_in_the_model(x):
    model = Remembers()
    zm.predict_proba(model, x, 6, chunk_size=2)
    assert model.seen.device.type == "cpu"
    assert model.seen > 0


def test_hooks_see_real_activations_in_every_run(x):
    model, seen = Remembers(), []
    model.first.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    zm.predict_proba(model, x, 6, chunk_size=2)
    assert seen == [(5, 6)] * 3


def test_lists_made_from_noise_free_tensors_are_new_in_every_run(x):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.noisy = zm.Linear(4, 2, posterior=zm.Additive)
            self.register_buffer("numbers", torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, value):
            numbers, total = self.numbers.tolist(), 0.0
            while numbers:
                total += numbers.pop()
            return 0 * self.noisy(value) + total

    assert (zm.sample_outputs(Model(), x, 4, chunk_size=1) == 6).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is deprecated
def test_scripted_parts_are_computed_in_full(x):
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), zm.Linear(4, 2))
    outputs = zm.sample_outputs(model, x, 6, chunk_size=2)
    assert len({o.sum().item() for o in outputs}) == 6


@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU])
def test_dropout_inside_recurrent_layers_differs_between_samples(recurrent):
    model = recurrent(4, 4, 2, dropout=0.5, batch_first=True)
    outputs = zm.sample_outputs(model, torch.randn(2, 3, 4), 6, select=lambda output: output[0])
    assert len({o.sum().item() for o in outputs}) == 6


def test_attention_dropout_differs_between_samples():
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    tokens = torch.randn(2, 5, 8)
    inputs = (tokens, tokens, tokens)
    outputs = zm.sample_outputs(attention, inputs, 6, select=lambda output: output[0])
    assert len({o.sum().item() for o in outputs}) == 6


def test_mean_sampling_around_a_prediction_keeps_dropout_off(x):
    model = nn.Sequential(network(posterior=zm.Additive), nn.Dropout(0.5)).train()
    with zm.sampling(model, zm.mean):
        assert zm.sample_outputs(model, x, 5).std(0).max() == 0
        with zm.sampling(model, zm.weight):
            pass
        assert zm.sample_outputs(model, x, 5).std(0).max() == 0
    assert zm.sample_outputs(model, x, 5).std(0).max() > 0
    assert model[1].training


def test_half_precision_outputs_are_averaged_in_single_precision(x):
    model = network().bfloat16()
    probabilities = zm.predict_proba(model, x.bfloat16(), 2000, chunk_size=50, seed=0)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5), rtol=0, atol=5e-3)


def test_softmax_of_half_precision_outputs_has_the_digits_of_single_precision(x):
    model = nn.Linear(4, 3).bfloat16()
    probabilities = zm.predict_proba(model, x.bfloat16(), 1)
    wanted = model(x.bfloat16()).float().softmax(-1)
    torch.testing.assert_close(probabilities, wanted, rtol=1e-6, atol=0)


def test_numbers_of_samples_may_be_numpys(x):
    assert len(zm.sample_outputs(network(), x, np.int64(5), chunk_size=np.int32(2))) == 5


def test_masked_classes_are_allowed(x):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.noisy = zm.Linear(4, 3)

        def forward(self, value):
            return self.noisy(value).masked_fill(torch.tensor([False, True, False]), -math.inf)

    probabilities = zm.predict_proba(Masked(), x, 10)
    assert (probabilities[:, 1] == 0).all()
    assert zm.predictive_uncertainty(Masked(), x, 10).mutual_information.isfinite().all()


def test_wrong_kinds_of_arguments_are_refused(x):
    with pytest.raises(TypeError, match=r"num_samples must be an integer, got 20\.0"):
        zm.sample_outputs(network(), x, 20.0)
    with pytest.raises(TypeError, match=r"sampler must be a function.*, got 'gibbs'"):
        zm.sample_outputs(nn.Linear(4, 2), x, 3, sampler="gibbs")
    with pytest.raises(ValueError, match=r"dim=5 is not a dimension of outputs of shape \(5, 3\)"):
        zm.predict_proba(network(), x, 3, dim=5)


class Twice(nn.Module):
    """One layer, called twice: w · w · x for a single weight."""

    def __init__(self):
        super().__init__()
        self.layer = zm.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight.scale)

    def forward(self, x):
        return self.layer(self.layer(x))


@pytest.mark.parametrize("chunk_size", [None, 50])
def test_one_network_has_one_weight_wherever_it_is_used(chunk_size):
    outputs = zm.sample_outputs(
        Twice(), torch.ones(1, 1), 4000, sampler=zm.weight, seed=0, chunk_size=chunk_size
    ).flatten()
    assert (outputs >= 0).all()  # squares
    assert (outputs.mean() - 1).abs() < 5 * outputs.std() / 4000**0.5
    assert outputs.unique().numel() > 3900


@pytest.mark.parametrize(
    "layer",
    [
        zm.LSTM(3, 4, posterior=zm.Additive),
        zm.GRU(3, 4),
        zm.LogNormalDropout(3),
        zm.GaussianDropout(3),
    ],
)
def test_one_network_has_the_same_gates_and_units_wherever_they_are_used(layer):
    difference = nn.Sequential(layer)
    outputs = (lambda x: layer(x)[0]) if isinstance(layer, (zm.LSTM, zm.GRU)) else layer
    difference.forward = lambda x: outputs(x) - outputs(x)
    x = torch.randn(5, 3)
    assert not zm.sample_outputs(difference, x, 7, sampler=zm.weight).any()
    difference.forward = outputs
    first, second = zm.sample_outputs(difference, x, 2, sampler=zm.weight)
    assert not torch.equal(first, second)


def test_models_that_write_into_their_inputs_see_them_whole_in_every_sample(x):
    head = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 3))
    before = x.clone()
    outputs = zm.sample_outputs(head, x, 400, seed=0)
    assert torch.equal(x, before)
    plain = nn.Sequential(nn.Dropout(0.5), head[1])
    wanted = zm.sample_outputs(plain, x, 400, seed=1)
    spread = (outputs.var(0) / 400 + wanted.var(0) / 400).sqrt()
    assert ((outputs.mean(0) - wanted.mean(0)).abs() < 5 * spread).all()

    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = zm.Linear(4, 3)

        def forward(self, value):
            return self.layer(value.mul_(2))

    model = Doubles()
    outputs = zm.sample_outputs(model, x, 6, seed=0, chunk_size=2)
    assert torch.equal(x, before)
    assert torch.equal(outputs, zm.sample_outputs(model.layer, 2 * x, 6, seed=0, chunk_size=2))


def test_tied_layers_have_one_weight():
    model = nn.Sequential(zm.Linear(3, 3, bias=False), zm.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    difference = nn.Sequential()
    difference.forward = lambda x: model[0](x) - model[1](x)
    difference.model = model
    assert not zm.sample_outputs(difference, torch.randn(2, 3), 5, sampler=zm.weight).any()
    assert zm.sample_outputs(difference, torch.randn(2, 3), 5, sampler=zm.local).any()
    assert all(layer.sampler is zm.local for layer in zm.stochastic_layers(model).values())


@pytest.mark.parametrize(
    ("model", "inputs", "elements"),
    [
        (
            nn.Sequential(nn.Embedding(50, 8), zm.Linear(8, 8), nn.Linear(8, 20000)),
            torch.zeros(8, 16, dtype=torch.int64),
            8 * 16 * 20000,
        ),
        (nn.Sequential(zm.Linear(16, 64), nn.Linear(64, 20000)), torch.zeros(64, 16), 64 * 20000),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_first_chunk_is_small_where_outputs_are_wide(model, inputs, elements, nested):
    size = chunks.first_chunk_size(model, ([inputs],) if nested else (inputs,))
    assert size * elements <= 2 * chunks.ELEMENTS_AT_ONCE


def test_one_image_is_sampled_in_one_chunk():
    model = lenet5_caffe(conv1=zm.Conv2d, conv2=zm.Conv2d, dense1=zm.Linear)
    assert chunks.first_chunk_size(model, (torch.zeros(1, 1, 28, 28),)) >= 20


def test_chains_of_dense_layers_start_with_many_samples():
    wide = nn.Sequential(zm.Linear(784, 200), nn.ReLU(), nn.Dropout(), nn.Linear(200, 10))
    inputs = (torch.zeros(128, 784),)
    assert chunks.first_chunk_size(wide, inputs) >= 20

    class Unknown(nn.Module):
        def forward(self, x):
            return x

    assert chunks.first_chunk_size(nn.Sequential(*wide, Unknown()), inputs) == 1
    attention = nn.MultiheadAttention(784, 1)
    assert chunks.first_chunk_size(nn.Sequential(*wide, attention), inputs) == 1


def test_masks_of_minus_infinity_are_inputs_like_others():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    zm.make_stochastic_(layer, where=lambda name, _: name == "linear1")
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    outputs = zm.sample_outputs(layer, (torch.randn(2, 5, 8), mask), 3)
    assert outputs.isfinite().all()
    with pytest.raises(ValueError, match="got 10 NaN or infinite"):
        zm.sample_outputs(layer, (torch.randn(2, 5, 8), -mask), 3)


def test_packed_sequences_are_one_argument():
    lstm = zm.LSTM(3, 2)
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    outputs = zm.sample_outputs(lstm, packed, 3, select=lambda output: output[0].data)
    assert outputs.shape == (3, 6, 2)


def test_seeds_touch_no_other_generators(monkeypatch):
    def touched(*_):
        raise AssertionError

    monkeypatch.setattr(torch, "manual_seed", touched)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched)
    zm.predict_proba(zm.Linear(3, 2), torch.randn(4, 3), seed=1)


def test_seeded_predictions_in_threads_are_reproduced():
    x = torch.randn(20, 30)
    model = nn.Sequential(zm.Linear(30, 50), zm.Linear(50, 4))
    models = [copy.deepcopy(model) for _ in range(3)]
    expected = zm.predict_proba(models[0], x, 30, seed=1)
    wrong = []

    def predict(model):
        for _ in range(10):
            if not torch.equal(zm.predict_proba(model, x, 30, seed=1), expected):
                wrong.append(model)

    threads = [threading.Thread(target=predict, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
@pytest.mark.parametrize("predict", [zm.predict_proba, zm.predict_moments, zm.sample_outputs])
def test_batches_of_examples_are_put_together(predict, batch_size):
    model, inputs = network(), torch.randn(7, 4)
    whole = predict(model, inputs, 5, sampler=zm.weight, seed=0)
    parts = predict(model, inputs, 5, sampler=zm.weight, seed=0, batch_size=batch_size)
    # Every sample is one network, for all examples.
    torch.testing.assert_close(parts, whole)


def test_batches_bound_what_the_model_sees_at_once():
    seen = []

    class Watch(nn.Module):
        def forward(self, x, shared):
            seen.append(len(x))
            return x + shared

    model = nn.Sequential(zm.Linear(4, 3))
    watched = Watch()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, shared):
            return watched(self.model(x), shared)

    inputs = {"x": torch.randn(10, 4), "shared": torch.zeros(3)}
    uncertainty = zm.predictive_uncertainty(Both(), inputs, 20, batch_size=4)
    assert uncertainty.mutual_information.shape == (10,)
    assert max(seen) == 4


def test_batches_need_examples_along_the_first_dimension():
    with pytest.raises(ValueError, match=r"examples along dimension 0.*\(3, 2\)"):
        zm.sample_outputs(network(), torch.randn(4, 4), 2, batch_size=2, select=lambda y: y.T)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        zm.sample_outputs(network(), torch.randn(4, 4), 2, batch_size=0)


@pytest.mark.parametrize("inputs", [torch.randn(4, 4).numpy(), [torch.randn(4, 4)]])
def test_inputs_that_are_no_tensors_are_refused(inputs):
    with pytest.raises(TypeError, match=r"must be a tensor.*got .*torch\.as_tensor\(inputs\)"):
        zm.predict_proba(network(), inputs)


class Storing(nn.Module):
    """Stores what it computes in every way that models do."""

    def __init__(self):
        super().__init__()
        self.noisy, self.plain = zm.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("state", torch.zeros(6))
        self.log = []

    def forward(self, x):
        hidden = self.noisy(x)
        self.features, self.pair = hidden, (x, hidden)
        self.maps = {"hidden": hidden}
        self.log.append(hidden)
        self.state = self.state + hidden.mean(0)
        return self.plain(hidden + self.state)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_what_a_model_stores_is_usable_after_a_prediction(x, chunk_size):
    model = Storing()
    outputs = zm.sample_outputs(model, x, 6, seed=0, chunk_size=chunk_size)
    state = copy.deepcopy(model).state_dict()["state"]
    for hidden in (model.features, model.pair[1], model.maps["hidden"], model.log[-1]):
        assert hidden.shape == (5, 6)
        torch.testing.assert_close(model.plain(hidden + state), outputs[-1])
    assert model(x).shape == (5, 2)


def test_what_a_vmap_around_a_prediction_stores_is_left_to_it():
    model = nn.Module()

    def store(value):
        model.outside = value * 2
        torch.func.vmap(lambda v: model.__dict__.update(inside=v * value) or v)(torch.arange(3.0))
        take_escaped_(model)
        assert is_batchedtensor(model.outside)
        return model.outside + model.inside

    assert torch.func.vmap(store)(torch.arange(4.0)).tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_made_inside_a_block_draws_like_the_model_outside(x, copied):
    model = nn.Sequential(zm.Linear(4, 3, posterior=zm.Additive, sampler=zm.flipout))
    for block in (zm.sampling(model, zm.mean), zm.held_noise(model)):
        with block:
            copies = copied(model), copied(model)
        for one in copies:
            assert one[0].sampler is zm.flipout
            assert (zm.sample_outputs(one, x, 5).std(0) > 0).all()


def test_seeds_may_be_numpys(x):
    model = zm.Linear(4, 3)
    first, second = (zm.sample_outputs(model, x, 2, seed=seed) for seed in (np.int64(3), 3))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_outputs_may_be_complex(x):
    model = nn.Sequential(zm.Linear(4, 4))
    outputs = zm.sample_outputs(model, x, 3, select=torch.fft.fft)
    assert outputs.is_complex()
    assert outputs.shape == (3, 5, 4)


def test_float8_inputs_are_refused_by_the_layer_that_gets_them():
    model = zm.Linear(4, 3)
    with pytest.raises(TypeError, match=r"inputs, got torch\.float8_e4m3fn; use"):
        zm.predict_proba(model, torch.randn(2, 4).to(torch.float8_e4m3fn))
