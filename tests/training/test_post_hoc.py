"""The parts of `add_uncertainty`, each against something independent."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean import uncertainty
from zeromean.training import Tempered, WithVariance
from zeromean.training.post_hoc.calibrated import smallest
from zeromean.training.post_hoc.contest import more
from zeromean.training.post_hoc.dropout import without_dropout_
from zeromean.training.post_hoc.last_layer import Laplace, head_of, variance_head
from zeromean.training.post_hoc.layer_sets import calls_of
from zeromean.training.post_hoc.tasks import Classes, Numbers, fitted_scale


def head_for(model, name, inputs, targets):
    return head_of(model, name, [(inputs, targets)], len(inputs))


def test_laplace_of_classes_is_the_inverse_of_the_hessian():
    inputs, labels = torch.randn(40, 3), torch.arange(40) % 4
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    inputs = inputs.double()
    features = model[:2](inputs).detach()

    def loss(weight):
        logits = F.linear(features, weight.view(4, 5), model[2].bias.detach())
        return F.cross_entropy(logits, labels, reduction="sum")

    weight = model[2].weight.detach().flatten()
    hessian = torch.autograd.functional.hessian(loss, weight)
    laplace = Laplace(model, head_for(model, "2", inputs, labels), Classes())
    posterior = laplace.candidate(prior_scale=2.0)[2].weight
    variance = 4 * model[2].weight.square().mean()
    expected = torch.linalg.inv(hessian + torch.eye(20) / variance)
    assert isinstance(posterior, zm.FullCovariance)
    assert torch.allclose(posterior.covariance(), expected, atol=1e-8)
    assert torch.equal(posterior.mean, model[2].weight)


def test_laplace_of_a_regression_is_bayesian_linear_regression():
    inputs, targets = torch.randn(30, 4).double(), torch.randn(30, 1).double()
    model = nn.Sequential(nn.Linear(4, 1)).double()
    head = head_for(model, "0", inputs, targets)
    constant = variance_head(model, head, by_input=False)
    noise = (model(inputs) - targets).square().mean()
    assert torch.allclose(
        constant(inputs), torch.cat([model(inputs), noise.log().expand(30, 1)], 1)
    )
    wider = head_for(constant, "0", inputs, targets)
    posterior = Laplace(constant, wider, Numbers(1)).candidate(1.0)[0].weight
    variance = constant[0].weight.square().mean()
    expected = torch.linalg.inv(inputs.T @ inputs / noise + torch.eye(4) / variance)
    assert torch.allclose(posterior.covariance()[:4, :4], expected, atol=1e-8)


def test_large_heads_have_a_variance_for_each_weight():
    model = nn.Sequential(nn.Linear(2, 900), nn.Tanh(), nn.Linear(900, 5))
    inputs, labels = torch.randn(20, 2), torch.arange(20) % 5
    posterior = Laplace(model, head_for(model, "2", inputs, labels), Classes()).candidate(1.0)
    assert isinstance(posterior[2].weight, zm.Additive)
    p, features = model(inputs).softmax(1), model[:2](inputs)
    expected = (p * (1 - p)).T @ features.square() + 1 / model[2].weight.square().mean()
    assert torch.allclose(posterior[2].weight.log_variance, -expected.log(), atol=1e-4)


class Scaled(nn.Sequential):
    def forward(self, x):
        return super().forward(x) / 9


def test_a_factor_behind_the_last_layer_is_found_and_more_than_that_is_refused():
    inputs, labels = torch.randn(20, 3), torch.arange(20) % 2
    model = Scaled(nn.Linear(3, 2))
    assert head_for(model, "0", inputs, labels).scale == pytest.approx(1 / 9)
    assert variance_head(model, head_for(model, "0", inputs, labels)) is None
    softened = nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1))
    assert head_for(softened, "0", inputs, labels) is None
    assert (
        head_for(nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten()), "0", inputs[:, None], labels)
        is None
    )


def test_variance_head_finds_the_noise_and_keeps_the_means():
    torch.manual_seed(1)
    inputs = torch.randn(20_000, 2)
    model = nn.Sequential(nn.Linear(2, 1))
    log_variance = 0.3 * inputs[:, :1] - 2
    targets = model(inputs).detach() + torch.randn(20_000, 1) * (log_variance / 2).exp()
    found = variance_head(model, head_for(model, "0", inputs, targets))
    outputs = found(inputs)
    assert torch.allclose(outputs[:, :1], model(inputs), atol=1e-5)
    slope = found[0].weight[1]
    # The penalty is w², next to the likelihood's w²/4 for standardized features.
    assert slope[0].item() == pytest.approx(0.3 / 5, abs=0.01)
    assert slope[1].item() == pytest.approx(0.0, abs=0.01)
    assert found[0].bias[1].item() == pytest.approx(-2 + 0.3**2 / 2, abs=0.05)


def test_likelihoods_are_those_of_torch_distributions():
    logits, labels = torch.randn(6, 50, 4), torch.arange(50) % 4
    average = (logits / 1.7).softmax(-1).mean(0)
    expected = F.nll_loss(average.log(), labels, reduction="none")
    assert torch.allclose(Classes().nll(logits, labels, 1.7), expected, atol=1e-5)
    outputs, targets = torch.randn(6, 50, 2).double(), torch.randn(50, 1).double()
    parts = torch.distributions.Normal(outputs[..., 0].T, 1.3 * (outputs[..., 1].T / 2).exp())
    weights = torch.distributions.Categorical(torch.ones(50, 6).double())
    mixture = torch.distributions.MixtureSameFamily(weights, parts)
    expected = -mixture.log_prob(targets[:, 0])
    assert torch.allclose(Numbers(1).nll(outputs, targets, 1.3), expected)


def test_scales_are_those_of_the_other_temperature_and_of_the_residuals():
    logits, labels = 5 * torch.randn(1, 400, 3), torch.arange(400) % 3
    other = uncertainty.fit_temperature(logits[0].softmax(-1), labels)
    assert fitted_scale(Classes(), logits, labels) == pytest.approx(min(other, 20.0), rel=1e-2)
    targets = 3 * torch.randn(400, 1)
    outputs = torch.zeros(1, 400, 2)
    expected = targets.square().mean().sqrt().item()
    assert fitted_scale(Numbers(1), outputs, targets) == pytest.approx(expected, rel=1e-3)
    assert smallest(lambda x: (x - 0.3) ** 2, -1, 1) == pytest.approx(0.3, abs=1e-4)


def test_intervals_cover_what_they_say():
    outputs = torch.stack([torch.zeros(20_000, 2), torch.tensor([2.0, 0.0]).expand(20_000, 2)])
    component = torch.randint(2, (20_000, 1)) * 2.0
    found = Numbers(1).measures(outputs, component + torch.randn(20_000, 1))
    error = 100 * math.sqrt(0.9 * 0.1 / 20_000)
    assert found["in 90% intervals, %"] == pytest.approx(90, abs=4 * error)


def test_operations_are_counted_in_the_order_of_the_calls():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 10), nn.Linear(10, 3))
    calls = calls_of(model, torch.randn(2, 1, 6, 6))
    conv, dense, last = calls.layers
    assert [each.name for each in calls.layers] == ["0", "2", "3"]
    assert [each.shares for each in calls.layers] == [True, False, False]
    assert dense.flops == 2 * 2 * 32 * 10
    assert last.before == calls.total - last.flops == conv.flops + dense.flops
    assert calls.num_examples == 2
    once, drawn = last.before + 2 * last.flops, 100 * 6
    assert calls.cost(1, 7) == pytest.approx((once + 7 * drawn) / calls.total)
    assert calls.cost(3, 7) > calls.cost(2, 7) > calls.cost(1, 7)
    assert calls.affordable(3, 20, 1.0) == 0
    assert calls.affordable(3, 20, 1e6) == 20


def test_draws_with_a_full_covariance_are_counted():
    model = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 10))
    calls = calls_of(model, torch.randn(2, 4))
    weights = 10 * 50 + 10
    drawn = 20 * 10 * weights**2 * 2 / 500 / calls.total
    assert calls.full_cost(20) == pytest.approx(calls.cost(1, 20) + drawn)


def test_transformers_are_counted_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)).eval()
    calls = calls_of(model, torch.randn(2, 3, 8))
    names = [each.name.rpartition(".")[2] for each in calls.layers]
    assert names == ["self_attn", "linear1", "linear2"]
    assert all(each.shares for each in calls.layers)


def test_dropout_is_off_in_every_kind_of_module():
    model = nn.Sequential(
        nn.Dropout(0.5), nn.LSTM(2, 2, 2, dropout=0.5), nn.MultiheadAttention(2, 1, dropout=0.5)
    )
    without_dropout_(model)
    assert (model[0].p, model[1].dropout, model[2].dropout) == (0.0, 0.0, 0.0)


def test_more_is_more_than_chance():
    zeros = torch.zeros(100)
    few, many = zeros.clone(), zeros.clone()
    few[:2], many[:3] = 1, 1
    assert not more(few, zeros)
    assert more(many, zeros)
    assert not more(zeros, many)


def test_wrapped_networks_are_saved_and_loaded(tmp_path):
    plain = nn.Linear(3, 2)
    tempered = Tempered(nn.Sequential(plain), 2.0)
    x = torch.randn(5, 3)
    assert torch.allclose(tempered(x), plain(x) / 2)
    zm.make_stochastic_(tempered)
    zm.save(tempered, tmp_path / "model")
    loaded = zm.load(tmp_path / "model", Tempered(nn.Sequential(nn.Linear(3, 2))))
    one, other = (zm.predict_proba(each, x, 3, seed=0) for each in (tempered, loaded))
    assert torch.equal(one, other)
    means = WithVariance(plain, 2, torch.tensor([1.0, 2.0]))(x)
    assert torch.equal(means, torch.cat([plain(x), torch.tensor([[1.0, 2.0]]).expand(5, 2)], 1))
