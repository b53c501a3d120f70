"""Deterministic variational inference: its data term, its gradient, and that it trains."""

from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.moments import RandomTensor, propagated
from zeromean.training import TrainingConfig, expected_nll, fit

ADDITIVE = {"posterior": partial(zm.Additive, log_variance=-3.0), "prior": zm.Normal(scale=1.0)}


def network(outputs):
    hidden = zm.Linear(4, 16, **ADDITIVE)
    return nn.Sequential(hidden, nn.ReLU(), zm.Linear(16, outputs, **ADDITIVE))


def sampled_nll(model, x, nll, num_samples=4000):
    with torch.no_grad():
        losses = torch.stack([nll(output) for output in zm.sample_outputs(model, x, num_samples)])
    return losses.mean(), losses.std() / num_samples**0.5


@pytest.mark.parametrize("kind", ["classes", "gaussian", "heteroscedastic"])
def test_the_data_term_is_what_samples_average_to(kind):
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    likelihood = {
        "classes": None,
        "gaussian": zm.GaussianLikelihood(3, noise_variance=0.5),
        "heteroscedastic": zm.HeteroscedasticGaussianLikelihood(),
    }[kind]
    model = network({"classes": 3, "gaussian": 3, "heteroscedastic": 4}[kind])
    y = torch.randint(3, (6,)) if kind == "classes" else torch.randn(6, model[2].out_features)
    if kind == "heteroscedastic":
        y = y[:, :2]
    nll = nn.functional.cross_entropy if likelihood is None else likelihood.nll
    expected, error = sampled_nll(model, x, lambda output: nll(output, y))
    found = expected_nll(propagated(model, lambda: model(x)), y, likelihood)
    # Logits of two stochastic layers are not quite normal.
    assert abs(found - expected) < 4 * error + 0.02 * expected.abs()


def test_outputs_without_noise_have_the_usual_nll():
    logits, y = torch.randn(5, 3), torch.tensor([0, 1, 2, -100, 1])
    found = expected_nll(logits, y)
    torch.testing.assert_close(found, nn.functional.cross_entropy(logits, y), atol=1e-5, rtol=1e-5)
    smooth = nn.functional.cross_entropy(logits, y, label_smoothing=0.1)
    found = expected_nll(logits, y, label_smoothing=0.1)
    torch.testing.assert_close(found, smooth, atol=1e-5, rtol=1e-5)


def test_its_gradient_has_no_variance():
    torch.manual_seed(0)
    model, x, y = network(3), torch.randn(6, 4), torch.randint(3, (6,))

    def gradient():
        loss = expected_nll(propagated(model, lambda: model(x)), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    first = gradient()
    torch.rand(7)
    assert torch.equal(first, gradient())
    assert first.abs().max() > 0


def test_fit_learns_by_it(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(400, 4)
    y = (x[:, 0] - x[:, 1] > 0).long()
    model = network(2)
    config = TrainingConfig(epochs=15, batch_size=50, lr=1e-2, beta=0.1, objective="moments")
    fit(model, (x, y), config, folder=tmp_path)
    found = zm.predict_proba(model, x, method="moments").argmax(-1)
    assert (found == y).float().mean() > 0.9


def test_what_it_does_not_know_is_refused():
    with pytest.raises(ValueError, match="objective='moments' computes in float32, got"):
        TrainingConfig(epochs=1, objective="moments", precision="bfloat16")
    with pytest.raises(ValueError, match="objective must be one of samples, moments, got 'mean'"):
        TrainingConfig(epochs=1, objective="mean")
    outputs = RandomTensor(torch.zeros(2, 1), torch.ones(2, 1))
    with pytest.raises(TypeError, match=r"expected_nll\(outputs, targets\), as zm.Gaussian"):
        expected_nll(outputs, torch.zeros(2, 1), nn.MSELoss())
