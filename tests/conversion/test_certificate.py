import copy
import math
from functools import partial
from itertools import pairwise

import pytest
import scipy.integrate
import scipy.stats
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.conversion.certificate import effective_log_alpha

EVERYTHING = {"where": lambda name, layer: True}
NUM_DRAWS = 20_000


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def bound_of(squared_distance):
    return math.erf(math.sqrt(squared_distance / 8))


def noisy(log_alpha, share="layer"):
    return partial(zm.Multiplicative, share=share, log_alpha=log_alpha)


class Threshold(nn.Module):
    """Two classes by the side of `cut` on which a statistic of the activations falls."""

    def __init__(self, statistic, cut):
        super().__init__()
        self.statistic = statistic
        self.cut = cut

    def forward(self, y):
        side = 1e6 * (self.statistic(y) - self.cut)
        return torch.stack([side, -side], -1)


def measured_change(model, x, **options):
    """Drop the means; the change of the averaged probabilities, its error, the certificate."""
    predict = partial(zm.predict_proba, seed=0, chunk_size=2_000, return_stderr=True)
    before, error = predict(model, x, NUM_DRAWS)
    certificate = zm.zero_mean_(model, **options)
    after, later_error = predict(model, x, NUM_DRAWS)
    return (after - before).abs().amax(-1), 4 * (error + later_error).amax(-1), certificate


# In weight space.


@pytest.mark.parametrize("posterior", [partial(zm.Additive, log_variance=1.0), noisy(4.0)])
@pytest.mark.parametrize("sampler", [zm.local, zm.weight, zm.flipout])
def test_weight_space_bound_is_the_formula(posterior, sampler):
    model = nn.Sequential(zm.Linear(3, 2, posterior=posterior, sampler=sampler))
    mean, variance = model[0].weight.moments()
    expected = bound_of((mean.double().square() / variance.double()).sum().item())
    certificate = zm.zero_mean_(model, **EVERYTHING)
    assert certificate.layers["0"].weight_space == pytest.approx(expected, rel=1e-6)
    assert certificate.layers["0"].activation_space is None
    assert certificate.bound == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 30.0, 1e4])
def test_bound_of_one_weight_is_the_total_variation(alpha):
    layer = zm.Linear(1, 1, posterior=noisy(math.log(alpha)), dtype=torch.float64)
    mean = layer.weight.mean.item()
    std = abs(mean) * math.sqrt(alpha)
    with_mean, without = scipy.stats.norm(mean, std), scipy.stats.norm(0, std)
    grid = sorted([mean / 2, min(mean, 0) - 12 * std, max(mean, 0) + 12 * std])
    total_variation = sum(
        scipy.integrate.quad(lambda w: abs(with_mean.pdf(w) - without.pdf(w)) / 2, *piece)[0]
        for piece in pairwise(grid)
    )
    certificate = zm.zero_mean_(nn.Sequential(layer), **EVERYTHING)
    assert certificate.bound == pytest.approx(total_variation, rel=1e-6)


@pytest.mark.parametrize("sampler", [zm.local, zm.weight, zm.flipout])
def test_bound_is_reached_by_the_worst_network(sampler):
    layer = zm.Linear(1, 1, bias=False, posterior=noisy(math.log(4.0)), sampler=sampler)
    x = torch.tensor([[1.0]])
    cut = layer.weight.mean.item() / 2
    model = nn.Sequential(layer, nn.Flatten(0), Threshold(lambda y: y, cut))
    change, error, certificate = measured_change(model, x, **EVERYTHING)
    assert certificate.bound == pytest.approx(bound_of(1 / 4), rel=1e-5)
    assert abs(change.item() - certificate.bound) < error.item()


@pytest.mark.parametrize("sampler", [zm.local, zm.weight])
def test_certificate_covers_the_change_of_a_classifier(sampler):
    layer = zm.Linear(4, 8, posterior=noisy(math.log(60.0), "weight"), sampler=sampler)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3))
    nn.init.normal_(model[2].weight, std=3.0)
    x = torch.randn(5, 4)
    change, error, certificate = measured_change(model, x, inputs=x, **EVERYTHING)
    weight_space = certificate.layers["0"].weight_space
    assert weight_space == pytest.approx(bound_of(32 / 60), rel=1e-5)
    assert certificate.per_input.shape == (5,)
    assert (certificate.per_input <= weight_space).all()
    assert (change <= certificate.per_input + error).all()
    assert change.max() > error.max()  # Else there would be nothing to cover.


def test_layer_called_twice_draws_twice():
    class Twice(nn.Module):
        def __init__(self, sampler):
            super().__init__()
            self.fc = zm.Linear(2, 2, posterior=noisy(4.0), sampler=sampler)

        def forward(self, x):
            return self.fc(self.fc(x))

    once = bound_of(4 * math.exp(-4))
    for sampler in (zm.weight, zm.local):
        certificate = zm.zero_mean_(Twice(sampler), inputs=torch.ones(3, 2), num_samples=5)
        assert certificate.layers["fc"].weight_space == pytest.approx(2 * once)
        assert (certificate.per_input <= 2 * once).all()


def test_padding_row_counts_only_if_its_mean_would_show():
    layer = zm.Embedding(3, 2, padding_idx=0, posterior=noisy(4.0), sampler=zm.weight)
    with torch.no_grad():
        layer.weight.mean[1:] = 1.0  # Else the means at random decide if the layer has converged.
    shown = copy.deepcopy(layer)
    with torch.no_grad():
        shown.weight.mean[0, 0] = 1.0
    certificate = zm.zero_mean_(nn.Sequential(layer))
    assert certificate.bound == pytest.approx(bound_of(4 * math.exp(-4)))
    assert zm.zero_mean_(nn.Sequential(shown)).bound == 1.0


# In activation space.


def test_convolution_under_local_needs_the_bound_in_activation_space():
    layer = zm.Conv2d(1, 1, 1, bias=False, posterior=noisy(math.log(100.0)), sampler=zm.local)
    x = torch.ones(1, 1, 10, 10)
    weight = layer.weight.mean.item()
    statistic = Threshold(lambda y: math.copysign(1, weight) * y.mean((1, 2, 3)), abs(weight) / 2)
    model = nn.Sequential(layer, statistic)
    without_inputs = zm.zero_mean_(copy.deepcopy(model), **EVERYTHING)
    assert without_inputs.layers["0"].weight_space is None
    assert without_inputs.bound == 1.0

    change, error, certificate = measured_change(model, x, inputs=x, **EVERYTHING)
    assert certificate.layers["0"].weight_space is None
    assert certificate.bound == pytest.approx(bound_of(1.0), rel=1e-5)
    assert change.item() > bound_of(1 / 100) + error.item()  # The weight-space bound is false.
    assert abs(change.item() - certificate.bound) < error.item()


def test_convolution_under_weight_has_the_bound_in_weight_space_alone():
    # Two positions whose difference shows one weight by itself: what they have in common hides
    # it in each position's variance, so that a sum over positions would promise far too much.
    small = 0.01
    layer = zm.Conv1d(2, 1, 1, bias=False, posterior=zm.Additive, sampler=zm.weight)
    with torch.no_grad():
        layer.weight.mean.copy_(torch.tensor([[[0.0], [1.0]]]))
        layer.weight.log_variance.fill_(math.log(4.0))
    x = torch.tensor([[[1.0, 1.0], [0.0, small]]])
    model = nn.Sequential(layer, Threshold(lambda y: (y[:, 0, 1] - y[:, 0, 0]) / small, 0.5))
    change, error, certificate = measured_change(model, x, inputs=x, **EVERYTHING)
    assert certificate.layers["0"].activation_space is None
    assert certificate.bound == pytest.approx(bound_of(1 / 4), rel=1e-5)
    assert abs(change.item() - certificate.bound) < error.item()


@pytest.mark.parametrize(
    ("layer", "shape", "holds"),
    [
        (partial(zm.Linear, 2, 2, sampler=zm.local), (3, 2), "both"),
        (partial(zm.Linear, 2, 2, sampler=zm.moment_matched), (3, 2), "both"),
        (partial(zm.Linear, 2, 2, sampler=zm.weight), (3, 2), "both"),
        (partial(zm.Linear, 2, 2, sampler=zm.flipout), (3, 2), "both"),
        (partial(zm.Linear, 2, 2, sampler=zm.local), (3, 4, 2), "activation"),
        (partial(zm.Linear, 2, 2, sampler=zm.weight), (3, 4, 2), "weight"),
        (partial(zm.Linear, 2, 2, sampler=zm.flipout), (3, 4, 2), "neither"),
        (partial(zm.Linear, 2, 2, sampler=zm.mean), (3, 2), "neither"),
        (partial(zm.Conv1d, 2, 2, 1, sampler=zm.local), (3, 2, 4), "activation"),
        (partial(zm.Conv1d, 2, 2, 1, sampler=zm.weight), (3, 2, 4), "weight"),
        (partial(zm.Conv1d, 2, 2, 1, sampler=zm.flipout), (3, 2, 4), "weight"),
        (partial(zm.Embedding, 2, 2, sampler=zm.local), (3, 4), "activation"),
        (partial(zm.Embedding, 2, 2, sampler=zm.weight), (3, 4), "both"),
        (partial(zm.Embedding, 2, 2, sampler=zm.flipout), (3, 4), "neither"),
    ],
)
def test_only_bounds_that_hold_are_offered(layer, shape, holds):
    layer = layer(posterior=noisy(4.0))
    x = torch.ones(shape, dtype=torch.int64 if isinstance(layer, zm.Embedding) else None)
    certificate = zm.zero_mean_(nn.Sequential(layer), inputs=x).layers["0"]
    assert (certificate.weight_space is not None) == (holds in ("weight", "both"))
    assert (certificate.activation_space is not None) == (holds in ("activation", "both"))
    assert certificate.bound.max() < 1 or holds == "neither"


def test_activation_space_bound_is_the_formula():
    layer = zm.Conv2d(2, 3, 3, padding=1, posterior=partial(zm.Additive, log_variance=2.0))
    x = torch.randn(4, 2, 5, 5)
    mean, log_variance = (p.detach().double() for p in layer.weight.parameters())
    signal = F.conv2d(x.double(), mean, padding=1).square()
    noise = F.conv2d(x.double().square(), log_variance.exp(), padding=1)
    distances = (signal / noise).sum((1, 2, 3)).tolist()
    certificate = zm.zero_mean_(nn.Sequential(layer), inputs=x, **EVERYTHING)
    expected = torch.tensor([bound_of(d) for d in distances], dtype=torch.float64)
    torch.testing.assert_close(certificate.per_input, expected, rtol=1e-5, atol=0)
    assert certificate.bound == certificate.per_input.max()


def test_bound_sees_the_outputs_that_the_layer_puts_out():
    class Upsample(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = zm.ConvTranspose2d(1, 1, 3, stride=2, posterior=noisy(4.0))

        def forward(self, x):
            return self.layer(input=x, output_size=(8, 8))

    model, x = Upsample(), torch.ones(1, 1, 3, 3)
    weight = model.layer.weight.mean.detach().double()
    geometry = {"stride": 2, "output_padding": 1}
    signal = F.conv_transpose2d(x.double(), weight, **geometry).square()
    noise = F.conv_transpose2d(x.double(), weight.square() * math.exp(4.0), **geometry)
    expected = bound_of(torch.where(noise > 0, signal / noise, 0.0).sum().item())
    assert zm.zero_mean_(model, inputs=x).bound == pytest.approx(expected, rel=1e-5)


def test_rows_that_belong_to_no_known_object_count_for_every_object():
    class TimeFirst(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x.transpose(0, 1)).transpose(0, 1)

    layer = zm.Linear(2, 2, posterior=noisy(4.0))
    x = torch.randn(3, 5, 2)
    time_first = zm.zero_mean_(TimeFirst(copy.deepcopy(layer)), inputs=x).per_input
    per_object = zm.zero_mean_(nn.Sequential(layer), inputs=x).per_input
    assert (time_first > per_object).all()


def test_layer_that_the_inputs_do_not_reach_changes_nothing():
    model = nn.ModuleDict({"unused": zm.Conv1d(2, 2, 1, posterior=noisy(4.0))})
    model.forward = lambda x: x
    assert torch.equal(
        zm.zero_mean_(model, inputs=torch.ones(3, 2)).per_input, torch.zeros(3).double()
    )


# Several layers.


def test_bounds_of_layers_add():
    model = nn.Sequential(*(zm.Linear(2, 2, posterior=noisy(a)) for a in (5.0, 6.0)))
    certificate = zm.zero_mean_(model)
    expected = bound_of(4 * math.exp(-5)) + bound_of(4 * math.exp(-6))
    assert certificate.bound == pytest.approx(expected, rel=1e-6)
    many = nn.Sequential(*(zm.Linear(9, 9, posterior=noisy(3.5)) for _ in range(5)))
    assert zm.zero_mean_(many).bound == 1.0


def test_certificate_covers_two_layers_with_random_inputs_to_the_second():
    alpha = math.log(25.0)
    model = nn.Sequential(
        zm.Conv1d(1, 2, 1, posterior=noisy(alpha)),
        nn.Flatten(),
        nn.Tanh(),
        zm.Linear(6, 2, posterior=noisy(alpha)),
        nn.Tanh(),
        nn.Linear(2, 2),
    )
    nn.init.normal_(model[5].weight, std=3.0)
    x = torch.randn(4, 1, 3)
    change, error, certificate = measured_change(model, x, inputs=x, num_samples=200, seed=1)
    assert set(certificate.layers) == {"0", "3"}
    assert (change <= certificate.per_input + error).all()
    assert certificate.bound < 1


def test_certificate_with_a_seed_is_reproducible():
    model = nn.Sequential(*(zm.Linear(2, 2, posterior=noisy(4.0)) for _ in range(2)))
    x = torch.randn(3, 2)
    bounds = [
        zm.zero_mean_(copy.deepcopy(model), inputs=x, num_samples=2, seed=seed).per_input
        for seed in (3, 3, 4)
    ]
    assert torch.equal(bounds[0], bounds[1])
    assert not torch.equal(bounds[0], bounds[2])


def test_layers_that_share_a_posterior_go_together():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    zm.make_stochastic_(model, posterior=noisy(6.0), sampler=zm.weight)
    certificate = zm.zero_mean_(model, where=lambda name, layer: name == "1")
    assert model[0].weight is model[1].weight
    assert set(certificate.layers) == {"0", "1"}
    assert certificate.bound == pytest.approx(2 * bound_of(12 * math.exp(-6)), rel=1e-5)


# What is dropped, and what stays.


def test_by_default_only_converged_layers_lose_their_means():
    model = nn.Sequential(
        zm.Linear(3, 3, posterior=noisy(5.0)),
        zm.Linear(3, 3, posterior=noisy(2.0)),
        zm.Linear(3, 3),
    )
    unchanged = model[1].weight
    assert list(zm.zero_mean_(model).layers) == ["0"]
    assert isinstance(model[0].weight, zm.ZeroMean)
    assert model[1].weight is unchanged


def test_effective_log_alpha_weighs_by_magnitude():
    posterior = zm.Additive((2,), dtype=torch.float64)
    with torch.no_grad():
        posterior.mean.copy_(torch.tensor([3.0, 4.0]))
        posterior.log_variance.copy_(torch.tensor([10.0, 40.0]).log())
    assert effective_log_alpha(posterior) == pytest.approx(math.log(2.0))
    assert effective_log_alpha(zm.ZeroMean((2,))) == math.inf


def test_variance_sampler_and_frozen_state_stay():
    model = nn.Sequential(zm.Linear(3, 2, posterior=noisy(5.0, "neuron"), sampler=zm.weight))
    model[0].weight.requires_grad_(False)
    _, variance = model[0].weight.moments()
    zm.zero_mean_(model)
    mean, after = model[0].weight.moments()
    assert mean is None
    torch.testing.assert_close(after, variance)
    assert model[0].sampler is zm.weight
    assert not model[0].weight.scale.requires_grad
    assert zm.kl_divergence(model) == 0


# Refusals, which leave the model as it was.


def assert_refuses(model, sentence, **options):
    before = [(layer.weight, layer.sampler) for layer in zm.stochastic_layers(model).values()]
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match=sentence):
        zm.zero_mean_(model, **options)
    after = [(layer.weight, layer.sampler) for layer in zm.stochastic_layers(model).values()]
    assert after == before
    assert [module.training for module in model.modules()] == modes


def test_model_without_a_converged_layer_is_refused():
    sentence = r"found no converged layer.*effective log α: 0 -5\.0; converged above 3.*where="
    model = nn.Sequential(zm.Linear(3, 2, posterior=noisy(-5.0)))
    assert_refuses(model, sentence)
    assert_refuses(model, "found no converged layer", where=lambda name, layer: False)
    assert_refuses(nn.Sequential(zm.Linear(3, 2)), "no stochastic layer with means")
    assert_refuses(nn.Sequential(nn.Linear(3, 2)), "no stochastic layer with means")


def test_other_noise_is_refused():
    posterior = partial(zm.Multiplicative, noise=zm.uniform, log_alpha=5.0)
    model = nn.Sequential(zm.Linear(3, 2, posterior=posterior))
    assert_refuses(model, "for normal noise, but 0 has uniform noise; leave it out with where=")


def test_bad_numbers_are_refused():
    model = nn.Sequential(zm.Linear(3, 2, posterior=noisy(5.0)), nn.BatchNorm1d(2))
    x = torch.ones(4, 3)
    assert_refuses(model, "num_samples must be at least 1, got 0", inputs=x, num_samples=0)
    for value in (math.nan, math.inf, 1e30):  # 1e30 overflows when squared.
        x[1, 1] = value
        assert_refuses(model, "must be finite, but 0 has NaN or infinite", inputs=x)
    with torch.no_grad():
        model[0].weight.log_alpha.fill_(math.nan)
    assert_refuses(model, "must be finite, but 0 has NaN or infinite", **EVERYTHING)


def test_inputs_that_the_model_refuses_leave_it_as_it_was():
    model = nn.Sequential(zm.Linear(3, 2, posterior=noisy(5.0)))
    assert_refuses(model, "Linear needs an input of shape", inputs=torch.ones(4, 5))


class TimeMajor(nn.Module):
    """Turns `(objects, steps, 1)` to `(steps, objects, 1)` before its layer."""

    def __init__(self):
        super().__init__()
        self.layer = zm.Linear(1, 1, bias=False, posterior=partial(zm.Additive, log_variance=0.0))
        nn.init.constant_(self.layer.weight.mean, 0.5)

    def forward(self, x):
        total = self.layer(x.transpose(0, 1)).sum(0)
        return 100 * torch.cat([total, -total], 1)


@pytest.mark.parametrize("steps", [15, 16, 17])
def test_bound_holds_whatever_the_order_of_steps_and_objects(steps):
    x = torch.zeros(16, steps, 1)
    x[0] = 1
    model = TimeMajor()
    before = zm.predict_proba(model, x, 2000, seed=0)
    certificate = zm.zero_mean_(model, inputs=x, where=lambda *_: True)
    after = zm.predict_proba(model, x, 2000, seed=0)
    assert (before - after).abs().max() < certificate.bound + 5 * (0.5 / 2000) ** 0.5


def test_inputs_without_a_tensor_are_refused():
    model = nn.Sequential(zm.Linear(3, 2, posterior=zm.Additive))
    with pytest.raises(ValueError, match="must hold a tensor"):
        zm.zero_mean_(model, inputs=("text",), where=lambda *_: True)


class Twice(nn.Module):
    """The difference of two outputs of one random weight: its noise nearly cancels."""

    def __init__(self, tied):
        super().__init__()
        self.first = zm.Linear(2, 1, bias=False, posterior=zm.Additive, sampler=zm.weight)
        with torch.no_grad():
            self.first.weight.mean.copy_(torch.tensor([[6.0, 0.0]]))
            self.first.weight.log_variance.zero_()
        self.second = self.first
        if tied:
            self.second = zm.Linear(2, 1, bias=False, posterior=zm.Additive, sampler=zm.weight)
            self.second.weight = self.first.weight

    def forward(self, a, b):
        difference = 1e6 * (self.second(b) - self.first(a))
        return torch.cat([torch.zeros_like(difference), difference], 1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_draw_that_is_used_twice_has_no_bound_in_activation_space(tied):
    model = Twice(tied)
    inputs = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.01, 1.0]])
    before = zm.predict_proba(model, inputs, 500, seed=0)
    certificate = zm.zero_mean_(model, where=lambda *_: True, inputs=inputs, seed=0)
    change = (zm.predict_proba(model, inputs, 500, seed=0) - before).abs().max()
    assert change > 0.4
    assert certificate.bound >= change
    assert all(c.activation_space is None for c in certificate.layers.values())


def test_dropping_means_leaves_the_global_generator_alone():
    model, inputs = nn.Sequential(zm.Linear(4, 3, posterior=noisy(5.0))), torch.randn(3, 4)
    state = torch.get_rng_state()
    zm.zero_mean_(model, inputs=inputs, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_layer_that_was_pruned_away_is_no_variance_layer():
    posterior = partial(zm.Additive, log_variance=30.0)
    model = nn.Sequential(
        zm.Linear(4, 3, posterior=posterior), zm.Linear(3, 2, posterior=posterior)
    )
    with pytest.warns(UserWarning, match="Nothing is left"):
        zm.prune_(model)
    assert effective_log_alpha(model[0].weight) == -math.inf
    assert_refuses(model, "no converged layer")
