"""Moments where they are exact, next to samples and to closed forms; the model stays as it was."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from cases import LAYERS, POSTERIORS
from zeromean.moments import RandomTensor, propagated
from zeromean.moments.rules import call_rule

NUM_SAMPLES = 4000
ACTIVATIONS = {
    "relu": (F.relu, 2e-6),
    "leaky_relu": (partial(F.leaky_relu, negative_slope=0.2), 2e-6),
    "relu6": (F.relu6, 2e-6),
    "hardtanh": (partial(F.hardtanh, min_val=-0.5, max_val=0.8), 2e-6),
    "hardsigmoid": (F.hardsigmoid, 2e-6),
    "clamp": (partial(torch.clamp, min=-0.3), 2e-6),
    "prelu": (lambda x: F.prelu(x, torch.full((1,), 0.3, dtype=x.dtype)), 2e-6),
    "square": (torch.square, 1e-5),
    "gelu": (F.gelu, 2e-3),
    "silu": (F.silu, 2e-3),
    "tanh": (torch.tanh, 2e-3),
    "sigmoid": (torch.sigmoid, 2e-3),
    "softplus": (F.softplus, 2e-3),
    "elu": (F.elu, 1e-2),
}


def by_quadrature(function, mean, variance):
    """The same moments by a fine grid over the normal distribution."""
    nodes = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    weights = (-nodes.square() / 2).exp()
    weights = weights / weights.sum()
    values = function(mean.double().unsqueeze(-1) + variance.double().sqrt().unsqueeze(-1) * nodes)
    average = values @ weights
    return average, (values - average.unsqueeze(-1)).square() @ weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_integrals_over_the_normal(name, graph, dtype):
    function, tolerance = ACTIVATIONS[name]
    torch.manual_seed(0)
    mean, std = 2 * torch.randn(50, dtype=dtype), 1.5 * torch.rand(50, dtype=dtype) + 0.01
    mean[:3], std[:3] = torch.tensor([0.0, 8.0, -8.0]), torch.tensor([1.0, 0.1, 0.1])
    expected_mean, expected_variance = by_quadrature(function, mean, std.square())
    with torch.set_grad_enabled(graph):
        found, variance = function(RandomTensor(mean, std.square())).moments()
    scale = 1 + expected_variance.sqrt()
    assert ((found - expected_mean).abs() / scale < tolerance + 5e-6).all()
    assert ((variance - expected_variance).abs() / scale.square() < 2 * tolerance + 5e-6).all()


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "sigmoid", "softplus", "elu"])
def test_smooth_activations_of_wide_inputs(name):
    function, mean = ACTIVATIONS[name][0], torch.linspace(-4, 4, 41, dtype=torch.float64)
    found, _ = function(RandomTensor(mean, torch.full_like(mean, 4.0))).moments()
    expected, _ = by_quadrature(function, mean, torch.full_like(mean, 4.0))
    assert (found - expected).abs().max() < (2e-3 if name == "elu" else 1e-3)


def test_without_variance_every_activation_is_itself():
    mean = torch.tensor([-1e6, -3.0, 0.0, 1e-20, 2.0, 1e6], requires_grad=True)
    for name, (function, _) in ACTIVATIONS.items():
        found, variance = function(RandomTensor(mean, torch.zeros(6))).moments()
        torch.testing.assert_close(found, function(mean), msg=name)
        assert (variance <= 1e-6 * (1 + mean.square())).all(), name
        gradient = torch.autograd.grad(found.sum(), mean)[0]
        assert gradient.isfinite().all(), name


def test_clark_is_the_largest_of_two():
    torch.manual_seed(0)
    means, variances = torch.randn(2, 40, dtype=torch.float64), torch.rand(2, 40).double()
    pair = RandomTensor(means[0], variances[0]), RandomTensor(means[1], variances[1])
    found, variance = torch.maximum(*pair).moments()
    # E max by the distribution of the second, whose expectation over the first is that of a ReLU.
    nodes = torch.linspace(-8, 8, 401, dtype=torch.float64)
    weights = (-nodes.square() / 2).exp() / (-nodes.square() / 2).exp().sum()
    z = means.unsqueeze(-1) + variances.sqrt().unsqueeze(-1) * nodes
    largest = torch.maximum(z[0].unsqueeze(-1), z[1].unsqueeze(-2))
    expected = torch.einsum("iab,a,b->i", largest, weights, weights)
    second = torch.einsum("iab,a,b->i", largest.square(), weights, weights)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(variance, second - expected.square(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "posterior", [*POSTERIORS, "FullCovariance", "LowRank", "Additive-factorized"]
)
@pytest.mark.parametrize("layer", ["Linear", "Conv2d", "ConvTranspose2d", "Embedding"])
def test_one_layer_is_exact(layer, posterior):
    further = {
        "FullCovariance": partial(zm.FullCovariance, log_variance=-3.0),
        "LowRank": partial(zm.LowRank, rank=3, log_variance=-3.0),
        "Additive-factorized": partial(zm.Additive, noise=zm.factorized, log_variance=-3.0),
    }
    kind = further.get(posterior) or POSTERIORS[posterior]
    if layer == "Embedding" and posterior in ("FullCovariance", "LowRank"):
        pytest.skip("it has no row without noise")
    torch.manual_seed(0)
    build, inputs = LAYERS[layer]
    model = build(posterior=kind, prior=None, sampler=zm.weight)
    if posterior == "FullCovariance":
        nn.init.normal_(model.weight.below, std=0.1)
    if posterior == "LowRank":
        nn.init.normal_(model.weight.factor, std=0.2)
    require_agreement(model, inputs())


def require_agreement(model, x, covariance=None):
    """Means and variances as those of samples, within five standard errors of both."""
    found = zm.propagate_moments(model, x, covariance=covariance)
    samples = zm.sample_outputs(model, x, NUM_SAMPLES, seed=1, chunk_size=1000)
    mean, std = samples.mean(0), samples.std(0)
    error = std / NUM_SAMPLES**0.5
    assert ((found.mean - mean).abs() <= 5 * error + 1e-6).all()
    # Of a variance: by the fourth moment, as noise need not be normal.
    fourth = (samples - mean).square().var(0).sqrt() / NUM_SAMPLES**0.5
    slack = 5 * fourth + std.square() / 200  # Noise of ±1 has no fourth moment of its own.
    assert ((found.variance - std.square()).abs() <= slack).all()
    if found.covariance is not None:
        flat = (samples - mean).flatten(1, -2) if samples.dim() > 2 else samples - mean
        sampled = torch.einsum("nri,nrj->rij", flat, flat) / NUM_SAMPLES
        scale = torch.einsum("ri,rj->rij", flat.std(0), flat.std(0))
        # Of exponential weights, products vary more than those of normal ones.
        squares = torch.einsum("nri,nrj->rij", flat.square(), flat.square()) / NUM_SAMPLES
        slack = 6 * torch.maximum(scale, squares.sqrt()) / NUM_SAMPLES**0.5
        wanted = found.covariance.reshape(sampled.shape)
        assert ((wanted - sampled).abs() <= slack + 1e-6).all()


@pytest.mark.parametrize("kind", ["ZeroMean", "Additive", "Multiplicative-neuron"])
def test_behind_one_stochastic_layer_everything_is_exact(kind):
    torch.manual_seed(0)
    hidden = zm.Linear(6, 40, posterior=POSTERIORS[kind], prior=None, sampler=zm.weight)
    norm = nn.BatchNorm1d(40)
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), hidden, norm, nn.ReLU(), nn.Linear(40, 3))
    require_agreement(model, torch.randn(4, 6), covariance=True)


def test_a_random_last_layer_keeps_the_covariance():
    torch.manual_seed(0)
    first = zm.Linear(5, 30, posterior=partial(zm.Additive, log_variance=-1.0), sampler=zm.weight)
    last = zm.Linear(30, 4, posterior=partial(zm.Additive, log_variance=-3.0), sampler=zm.weight)
    require_agreement(nn.Sequential(first, nn.LeakyReLU(), last), torch.randn(3, 5), True)


def test_a_full_covariance_behind_noise_is_exact():
    torch.manual_seed(0)
    last = zm.Linear(20, 3, posterior=zm.FullCovariance)
    nn.init.normal_(last.weight.below, std=0.05)
    model = nn.Sequential(nn.Linear(5, 20), nn.Dropout(0.3), last)
    require_agreement(model, torch.randn(3, 5), covariance=True)


def test_dropout_and_noise_on_units_are_exact():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 30), nn.Dropout(0.4), nn.Linear(30, 3))
    require_agreement(plain, torch.randn(4, 6), covariance=True)
    gaussian = nn.Sequential(zm.GaussianDropout(6, p=0.3), nn.Linear(6, 4))
    require_agreement(gaussian, torch.randn(4, 6))
    log_normal = zm.LogNormalDropout(6, location=-1.0, log_scale=-0.5)
    require_agreement(nn.Sequential(log_normal, nn.Linear(6, 4)), torch.randn(4, 6))


class Residual(nn.Module):
    """Operations that are linear, on halves that are independent of each other."""

    def __init__(self):
        super().__init__()
        self.noise = zm.Conv1d(2, 4, 3, padding=1, posterior=zm.Additive, sampler=zm.local)
        nn.init.constant_(self.noise.weight.log_variance, -2.0)

    def forward(self, x):
        y = self.noise(x)
        first, second = y.chunk(2, dim=1)
        y = torch.cat([first - second, 2 * second, x], dim=1)
        y += x.mean()
        y = F.pad(y.permute(0, 2, 1).contiguous().view(len(y), -1), (1, 1), value=3.0)
        return torch.stack([y[:, ::2], -y[:, 1::2] / 4], dim=1).sum(-1, keepdim=True).squeeze(-1)


def test_moving_adding_and_joining_keep_moments():
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(3, 2, 6)
    found = zm.propagate_moments(model, x)
    samples = zm.sample_outputs(model, x, NUM_SAMPLES, seed=1, chunk_size=1000)
    torch.testing.assert_close(found.mean, samples.mean(0), atol=0.1, rtol=0.02)


POOLS = {
    "avg": (nn.AvgPool2d(3, 2, padding=1), nn.AvgPool2d(2, ceil_mode=True)),
    "avg not counting": (nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),),
    "adaptive": (nn.AdaptiveAvgPool2d((3, 2)), nn.AdaptiveAvgPool2d(1)),
    "avg1d": (nn.AvgPool1d(3, 2, padding=1), nn.AdaptiveAvgPool1d(2)),
}


@pytest.mark.parametrize("name", POOLS)
def test_averages_are_linear_maps(name):
    """Their variance is that of the matrix that they are."""
    torch.manual_seed(0)
    for pool in POOLS[name]:
        shape = (
            (1, 2, 7) if isinstance(pool, (nn.AvgPool1d, nn.AdaptiveAvgPool1d)) else (1, 2, 7, 5)
        )
        mean, variance = torch.randn(shape), torch.rand(shape)
        found, spread = pool(RandomTensor(mean, variance)).moments()
        torch.testing.assert_close(found, pool(mean))
        matrix = torch.func.jacrev(pool)(mean).reshape(found.numel(), mean.numel())
        expected = matrix.square() @ variance.flatten()
        torch.testing.assert_close(spread.flatten(), expected)


MAX_POOLS = {
    "even": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, padding=1),
    "dilated": nn.MaxPool2d(2, 1, dilation=2),
    "ceil": nn.MaxPool2d((3, 2), 2, ceil_mode=True),
    "adaptive": nn.AdaptiveMaxPool2d((3, 2)),
}


@pytest.mark.parametrize("name", MAX_POOLS)
def test_max_pooling_is_near_samples_and_exact_without_noise(name):
    torch.manual_seed(0)
    pool, mean = MAX_POOLS[name], torch.randn(2, 3, 6, 8)
    found, variance = pool(RandomTensor(mean, torch.zeros_like(mean))).moments()
    torch.testing.assert_close(found, pool(mean))
    assert (variance == 0).all()
    std = torch.rand_like(mean)
    found, variance = pool(RandomTensor(mean, std.square())).moments()
    samples = torch.stack([pool(mean + std * torch.randn_like(mean)) for _ in range(4000)])
    # Clark takes the larger of two for normal: a few per cent of a standard deviation.
    assert ((found - samples.mean(0)).abs() / samples.std(0)).max() < 0.15
    assert ((variance.sqrt() / samples.std(0)).log().abs()).mean() < 0.1


def test_pooling_goes_before_the_activation_where_it_may():
    torch.manual_seed(0)
    mean, variance = torch.randn(1, 1, 4, 4), torch.rand(1, 1, 4, 4)
    x = RandomTensor(mean, variance)
    found = F.max_pool2d(F.relu(x), 2).moments()
    expected = F.relu(F.max_pool2d(x, 2)).moments()
    torch.testing.assert_close(found, expected)


def test_in_place_functions_change_what_others_read():
    x = RandomTensor(torch.zeros(3), torch.ones(3))
    y = F.relu(x, inplace=True)
    torch.testing.assert_close(x.moments(), y.moments())
    x *= 2
    x.add_(1)
    torch.testing.assert_close(x.moments()[0], 1 + 2 * torch.full((3,), 0.3989423))


def test_large_tensors_go_in_chunks_to_the_same_numbers():
    torch.manual_seed(0)
    mean = torch.randn(64, 8, 20, 20).to(memory_format=torch.channels_last)
    variance = torch.rand(64, 8, 20, 20)
    with torch.no_grad():
        chunked = F.relu(RandomTensor(mean, variance)).moments()
        parts = zip(mean, variance, strict=True)
        rows = [F.relu(RandomTensor(m[None], v[None])).moments() for m, v in parts]
    torch.testing.assert_close(chunked[0], torch.cat([mean for mean, _ in rows]))
    torch.testing.assert_close(chunked[1], torch.cat([variance for _, variance in rows]))


def test_the_deterministic_part_stays_plain():
    seen = []
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), zm.Linear(5, 3))
    model[1].register_forward_hook(lambda module, args, output: seen.append(type(output)))
    zm.propagate_moments(model, torch.randn(2, 4))
    assert seen == [torch.Tensor]


def test_the_model_and_the_generator_are_as_they_were():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(), zm.Linear(5, 3)).train()
    state = torch.get_rng_state()
    samplers = model[2].sampler
    zm.predict_proba(model, torch.randn(2, 4, generator=torch.Generator()), method="moments")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model[2].sampler is samplers
    assert "forward" not in vars(model[1])


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    model = nn.Sequential(
        zm.Conv2d(1, 2, 2, posterior=zm.Additive), nn.MaxPool2d(2), nn.Flatten(),
        zm.Linear(2, 3, posterior=zm.Additive), nn.LeakyReLU(), nn.Linear(3, 2),
    ).double()  # fmt: skip
    for layer in (model[0], model[3]):
        nn.init.constant_(layer.weight.log_variance, -1.0)
    x = torch.randn(2, 1, 3, 3, dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]

    def outputs(*parameters):
        given = dict(zip(names, parameters, strict=True))
        call = lambda: torch.func.functional_call(model, given, (x,))  # noqa: E731
        output = propagated(model, call)
        return (*output.moments(), output.covariance_of())

    parameters = tuple(p.detach().clone().requires_grad_() for p in model.parameters())
    assert torch.autograd.gradcheck(outputs, parameters, eps=1e-6, atol=1e-5)


def test_rules_are_looked_up_by_function():
    x = RandomTensor(torch.zeros(2), torch.ones(2))
    assert isinstance(call_rule(F.relu, (x,), {}), RandomTensor)
    assert "RandomTensor((2,)" in repr(x)
    assert (x.dim(), len(x), x.shape, x.size(0), x.ndim) == (1, 2, (2,), 2, 1)
    assert x.dtype == torch.float32
    assert x.device.type == "cpu"
