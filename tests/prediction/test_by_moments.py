"""Predictions without samples: as those of samples, and what they refuse."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.moments import NoRuleError, RandomTensor, elementwise, register, rules

ADDITIVE = {"posterior": partial(zm.Additive, log_variance=-2.0), "prior": None}


def classifier(classes=3):
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), zm.Linear(16, classes, **ADDITIVE))


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(5, 4)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_probabilities_and_entropies_are_those_of_samples(x, link):
    model = classifier()
    p, error = zm.predict_proba(model, x, 20_000, link=link, return_stderr=True, seed=0)
    found = zm.predict_proba(model, x, link=link, method="moments")
    assert ((found - p).abs() < 5 * error + 1e-3).all()
    sampled, errors = zm.predictive_uncertainty(
        model, x, 20_000, link=link, return_stderr=True, seed=0
    )
    by_moments = zm.predictive_uncertainty(model, x, link=link, method="moments")
    for one, other, slack in zip(by_moments, sampled, errors, strict=True):
        assert ((one - other).abs() < 5 * slack + 4e-3).all()


@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_a_regression_is_that_of_samples(x, heteroscedastic):
    likelihood = (
        zm.HeteroscedasticGaussianLikelihood() if heteroscedastic else zm.GaussianLikelihood(2)
    )
    model = classifier(2)
    sampled, errors = zm.predict_moments(
        model, x, 20_000, likelihood=likelihood, return_stderr=True, seed=0
    )
    found = zm.predict_moments(model, x, likelihood=likelihood, method="moments")
    for one, other, slack in zip(found, sampled, errors, strict=True):
        assert ((one - other).abs() < 5 * slack + 1e-5).all()


def test_networks_count_alike_and_batches_change_nothing(x):
    members = [classifier(), classifier()]
    each = [zm.predict_proba(member, x, method="moments") for member in members]
    found = zm.predict_proba(members, x, method="moments")
    torch.testing.assert_close(found, (each[0] + each[1]) / 2)
    batched = zm.predict_proba(members, x, method="moments", batch_size=2)
    torch.testing.assert_close(found, batched)
    moments = [zm.predict_moments(member, x, method="moments") for member in members]
    mixture = zm.predict_moments(members, x, method="moments")
    spread = (moments[0].mean - moments[1].mean).square() / 4
    within = (moments[0].epistemic + moments[1].epistemic) / 2
    torch.testing.assert_close(mixture.epistemic, within + spread)


def test_without_noise_it_is_a_plain_pass(x):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    found = zm.predict_proba(model, x, method="moments")
    torch.testing.assert_close(found, model.eval()(x).softmax(-1), atol=1e-5, rtol=1e-5)


def test_a_model_that_ends_in_log_softmax_returns_logits(x):
    model = classifier()
    expected = zm.predict_proba(model, x, method="moments")
    ended = nn.Sequential(model, nn.LogSoftmax(-1))
    torch.testing.assert_close(
        zm.predict_proba(ended, x, method="moments"), expected, atol=2e-3, rtol=0
    )


def test_a_model_that_ends_in_softmax_returns_probabilities(x):
    model = classifier()
    expected = zm.predict_proba(model, x, method="moments")
    ended = nn.Sequential(model, nn.Softmax(-1))
    found = zm.predict_proba(ended, x, outputs="probabilities", method="moments")
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"ends in nn\.Softmax"):
        zm.predict_proba(ended, x, method="moments")
    with pytest.raises(ValueError, match="expected entropy of probabilities has no moments"):
        zm.predictive_uncertainty(ended, x, outputs="probabilities", method="moments")


def test_propagated_moments_say_how_far_they_are(x):
    model = nn.Sequential(zm.Linear(4, 20, **ADDITIVE), nn.ReLU(), zm.Linear(20, 3, **ADDITIVE))
    found = zm.propagate_moments(model, x, compare_with_samples=4000, seed=0)
    assert found.covariance.shape == (5, 3, 3)
    torch.testing.assert_close(found.covariance.diagonal(dim1=1, dim2=2), found.variance)
    assert found.comparison.mean_error < 2 * found.comparison.mean_noise
    assert found.comparison.variance_error < 0.05
    plain = zm.propagate_moments(nn.Linear(4, 3), x, compare_with_samples=2)
    assert plain.comparison[2:] == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "build",
    [
        partial(zm.MultiheadAttention, 4, 2, batch_first=True, **ADDITIVE),
        partial(nn.MultiheadAttention, 4, 2, dropout=0.2, batch_first=True),
        partial(nn.TransformerEncoderLayer, 4, 2, 8, dropout=0.1, batch_first=True),
        partial(nn.GroupNorm, 2, 6),
        partial(nn.LayerNorm, 4),
    ],
    ids=lambda build: build.func.__module__.split(".")[0] + "." + build.func.__name__,
)
def test_what_is_approximate_is_near_samples(build):
    torch.manual_seed(0)  # Before weights are drawn: those of another order may be harder.
    layer = build()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.noise = nn.Dropout(0.1)
            self.layer = layer

        def forward(self, x):
            x = self.noise(x)
            attends = isinstance(self.layer, (nn.MultiheadAttention, zm.MultiheadAttention))
            return self.layer(x, x, x)[0] if attends else self.layer(x)

    torch.manual_seed(0)
    x = torch.randn(3, 6, 4)
    found = zm.propagate_moments(Model(), x, compare_with_samples=2000, seed=0).comparison
    assert found.mean_error < 0.6
    assert found.variance_error < 0.4


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = zm.Linear(4, 3)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else -y


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def behind_noise(function):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = zm.Linear(4, 3)

        def forward(self, x):
            return function(self.layer(x))

    return Model()


REFUSED = {
    "no rule": (
        behind_noise(lambda y: y.cumsum(0)),
        r"no rule for the moments of Tensor.cumsum; use method='samples', or give it a rule of "
        r"your own with zeromean.moments.register",
    ),
    "control flow": (Branching(), "reads the value of a random activation.*method='samples'"),
    "draws": (Noisy(), r"draws noise of its own \(randn_like\)"),
    "quotient": (behind_noise(lambda y: 1 / y), "Dividing by a random activation"),
    "power": (behind_noise(lambda y: y**3), "squares and for no other power, got an exponent of 3"),
    "interpolation": (
        behind_noise(lambda y: F.interpolate(y[None], 6, mode="linear")),
        "mode='nearest', got 'linear'",
    ),
    "indices": (
        behind_noise(lambda y: F.max_pool1d(y[None], 2, return_indices=True)[0]),
        "Which element of a window is the largest is random",
    ),
    "lstm": (
        nn.Sequential(zm.LSTM(4, 3)),
        "LSTM draws its weights once for all steps.*method='samples'",
    ),
    "alpha dropout": (nn.Sequential(nn.AlphaDropout(0.5)), "alpha_dropout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_moments_is_refused_in_a_sentence(x, name):
    model, message = REFUSED[name]
    modes = [module.training for module in model.modules()]
    with pytest.raises(NoRuleError, match=message):
        zm.propagate_moments(model, x)
    assert [module.training for module in model.modules()] == modes
    assert not any("forward" in vars(module) for module in model.modules())


def test_batchnorm_needs_statistics_of_its_own(x):
    model = nn.Sequential(zm.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(NoRuleError, match="BatchNorm takes its statistics from the batch here"):
        zm.predict_proba(model, x, method="moments")


def test_options_of_samples_and_covariances_that_are_not_there_are_refused(x):
    model = classifier()
    with pytest.raises(ValueError, match="method must be one of samples, moments, got 'mean'"):
        zm.predict_proba(model, x, method="mean")
    with pytest.raises(ValueError, match="seed= is for samples, and method='moments' draws none"):
        zm.predict_proba(model, x, method="moments", seed=0)
    with pytest.raises(ValueError, match="sampler= is for samples"):
        zm.predict_moments(model, x, method="moments", sampler=zm.weight)
    with pytest.raises(
        ValueError, match=r"no samples, and so has no standard errors.*compare_with"
    ):
        zm.predictive_uncertainty(model, x, method="moments", return_stderr=True)
    with pytest.raises(ValueError, match="seed= is for compare_with_samples="):
        zm.propagate_moments(model, x, seed=0)
    with pytest.raises(ValueError, match=r"4,097 outputs is 16,785,409 numbers for each example"):
        zm.propagate_moments(nn.Linear(4, 4097), x, covariance=True)
    ended = nn.Sequential(model, nn.Tanh())
    assert zm.propagate_moments(ended, x).covariance is None
    with pytest.raises(ValueError, match="covariance of these outputs is not known"):
        zm.propagate_moments(ended, x, covariance=True)
    model[0].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"The parameter 0\.weight is not finite"):
        zm.predict_proba(model, x, method="moments")


def test_rules_of_ones_own(x, monkeypatch):
    monkeypatch.setattr(rules, "_FUNCTIONS", dict(rules._FUNCTIONS))
    monkeypatch.setattr(rules, "_MODULES", dict(rules._MODULES))

    class Cumulative(nn.Module):
        def forward(self, y):
            return y.cumsum(-1)

    @register(Cumulative)
    def cumulative(module, y):
        mean, variance = y.moments()
        return RandomTensor(mean.cumsum(-1), variance.cumsum(-1))

    register(torch.atan)(elementwise(torch.atan))
    model = nn.Sequential(zm.Linear(4, 3, **ADDITIVE), Cumulative())
    found = zm.propagate_moments(model, x)
    samples = zm.sample_outputs(model, x, 4000, seed=0)
    torch.testing.assert_close(found.variance, samples.var(0), rtol=0.15, atol=0.01)
    assert zm.propagate_moments(behind_noise(torch.atan), x).variance.min() > 0
    with pytest.raises(TypeError, match=r"for functions or classes of modules.*got 'tan'"):
        register("tan")


def test_compressed_networks_have_the_same_moments():
    torch.manual_seed(0)
    sparse = nn.Linear(40, 300)
    sparse.weight.data.mul_(torch.rand(300, 40) < 0.03)
    model = nn.Sequential(zm.Linear(8, 40), nn.ReLU(), sparse, nn.ReLU(), nn.Linear(300, 3))
    small = zm.compress(model)
    assert not any(isinstance(module, nn.Linear) and module.in_features == 40 for module in small)
    x = torch.randn(4, 8)
    expected = zm.predict_proba(model, x, method="moments")
    torch.testing.assert_close(zm.predict_proba(small, x, method="moments"), expected)
