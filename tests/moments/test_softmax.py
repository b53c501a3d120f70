"""Expected softmax and sigmoid, next to a million samples and to each other."""

import math

import pytest
import torch

from zeromean.functional import expected_sigmoid, expected_softmax


def sampled(mean, factor, number):
    """Probabilities, their variances, expected entropy and log Σ e^z of samples."""
    generator = torch.Generator().manual_seed(0)
    sums = [0.0] * 4
    for _ in range(number // 50_000):
        noise = torch.randn(50_000, len(mean), generator=generator)
        logs = mean + (noise * factor if factor.dim() == 1 else noise @ factor.T)
        normalizer = logs.logsumexp(-1)
        p = (logs - normalizer.unsqueeze(-1)).exp()
        entropy = normalizer - (p * logs).sum(-1)
        parts = (p.sum(0), p.square().sum(0), entropy.sum(), normalizer.sum())
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    first, second, entropy, normalizer = (total / number for total in sums)
    return first, second - first.square(), entropy, normalizer


# 10⁶ samples have an error of 5e-4 for the largest probabilities.
@pytest.mark.parametrize(("classes", "scale"), [(2, 0.5), (2, 3.0), (10, 1.0), (10, 4.0)])
def test_points_are_a_million_samples(classes, scale):
    torch.manual_seed(classes)
    mean = 2 * torch.randn(classes)
    factor = scale * torch.randn(classes, classes) / math.sqrt(classes)
    found = expected_softmax(mean, covariance=factor @ factor.T)
    p, variance, entropy, normalizer = sampled(mean, factor, 1_000_000)
    assert (found.mean - p).abs().max() < 1.5e-3
    assert (found.variance - variance).abs().max() < 2e-3
    assert (found.expected_entropy - entropy).abs() < 4e-3
    assert (found.log_normalizer - normalizer).abs() < 5e-3 * scale + 2e-3
    torch.testing.assert_close(found.mean.sum(), torch.tensor(1.0))


@pytest.mark.parametrize(("classes", "scale"), [(2, 0.3), (10, 3.0), (10, 6.0)])
def test_the_integral_is_a_million_samples(classes, scale):
    torch.manual_seed(classes)
    mean, std = 2 * torch.randn(classes), scale * torch.rand(classes)
    found = expected_softmax(mean, variance=std.square())
    p, variance, entropy, normalizer = sampled(mean, std, 1_000_000)
    assert (found.mean - p).abs().max() < 1.5e-3
    assert (found.variance - variance).abs().max() < 0.08  # By the slope of the softmax.
    assert (found.expected_entropy - entropy).abs() < 2e-3
    assert (found.log_normalizer - normalizer).abs() < 2e-3 * scale + 2e-3


def test_a_thousand_classes():
    torch.manual_seed(0)
    mean, std = 3 * torch.randn(1000), 2 * torch.rand(1000)
    found = expected_softmax(mean, variance=std.square())
    p = sampled(mean, std, 100_000)[0]
    largest = p.argmax()
    error = (p[largest] / 100_000) ** 0.5
    assert (found.mean - p).abs().max() < 1e-3 + 3 * error
    torch.testing.assert_close(found.mean.sum(), torch.tensor(1.0))


def test_both_ways_agree():
    torch.manual_seed(1)
    mean, std = torch.randn(5, 6), 2 * torch.rand(5, 6)
    by_points = expected_softmax(mean, covariance=torch.diag_embed(std.square()))
    by_integral = expected_softmax(mean, variance=std.square())
    torch.testing.assert_close(by_points.mean, by_integral.mean, atol=1e-3, rtol=0)
    pair = by_points.expected_entropy, by_integral.expected_entropy
    torch.testing.assert_close(*pair, atol=3e-3, rtol=0)


def test_without_noise_it_is_the_softmax_and_masked_classes_have_none():
    logits = torch.tensor([[1.0, -math.inf, 3.0, 1000.0], [0.0, 1.0, 2.0, -math.inf]])
    zeros = torch.zeros(2, 4)
    for found in (
        expected_softmax(logits, variance=zeros),
        expected_softmax(logits, covariance=torch.diag_embed(zeros)),
    ):
        torch.testing.assert_close(found.mean, logits.softmax(-1), atol=1e-5, rtol=1e-4)
        entropy = torch.distributions.Categorical(logits=logits.clamp_min(-1e9)).entropy()
        torch.testing.assert_close(found.expected_entropy, entropy, atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    mean = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    variance = torch.rand(2, 3, dtype=torch.float64).add(0.5).requires_grad_()

    def by_points(mean, factor):
        return expected_softmax(mean, covariance=factor @ factor.mT, num_points=64)[0]

    assert torch.autograd.gradcheck(by_points, (mean, factor), atol=1e-5)
    assert torch.autograd.gradcheck(
        lambda m, v: expected_softmax(m, variance=v)[0], (mean, variance), atol=1e-4, eps=1e-5
    )


def test_sigmoid_is_an_integral():
    mean, variance = torch.tensor([0.0, 2.0, -1.0, 0.3]), torch.tensor([0.0, 1.0, 25.0, 100.0])
    nodes = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    weights = (-nodes.square() / 2).exp() / (-nodes.square() / 2).exp().sum()
    z = mean.double().unsqueeze(-1) + variance.double().sqrt().unsqueeze(-1) * nodes
    yes = z.sigmoid()
    average = yes @ weights
    found, spread, entropy = expected_sigmoid(mean, variance)
    expected = torch.distributions.Bernoulli(logits=z).entropy() @ weights
    torch.testing.assert_close(found.double(), average, atol=1e-4, rtol=0)
    second = (yes - average.unsqueeze(-1)).square() @ weights
    torch.testing.assert_close(spread.double(), second, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy.double(), expected, atol=1e-4, rtol=0)


def test_what_does_not_fit_is_refused():
    logits = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="needs either variance= or covariance="):
        expected_softmax(logits)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) need a tensor of shape \(2, 3, 3\), got"):
        expected_softmax(logits, covariance=logits)
