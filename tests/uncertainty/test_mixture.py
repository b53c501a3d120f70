import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

import zeromean as zm
from zeromean.uncertainty import GaussianMixture, predict_interval, predict_mixture


@pytest.fixture
def mixture():
    """Three components for four examples."""
    generator = torch.Generator().manual_seed(6)
    means = torch.randn(3, 4, generator=generator).double()
    return GaussianMixture(means, 0.1 + torch.rand(3, 4, generator=generator).double())


@pytest.fixture
def reference(mixture):
    components = Normal(mixture.means.T, mixture.variances.T.sqrt())
    return MixtureSameFamily(Categorical(torch.ones(4, 3)), components)


TARGETS = torch.tensor([0.3, -1.2, 4.0, 0.0], dtype=torch.float64)


def test_distribution_is_torchs(mixture, reference):
    torch.testing.assert_close(mixture.log_density(TARGETS), reference.log_prob(TARGETS))
    torch.testing.assert_close(mixture.cdf(TARGETS), reference.cdf(TARGETS))
    torch.testing.assert_close(mixture.mean, reference.mean)
    torch.testing.assert_close(mixture.variance, reference.variance)


def test_quantiles_invert_the_distribution(mixture, reference):
    for probability in (0.001, 0.05, 0.5, 0.9):
        values = mixture.quantile(probability)
        torch.testing.assert_close(reference.cdf(values), torch.full((4,), probability).double())
    lower, upper = mixture.interval(0.8)
    torch.testing.assert_close(
        mixture.cdf(upper) - mixture.cdf(lower), torch.full((4,), 0.8).double()
    )


def test_crps_is_the_integral_of_its_definition(mixture, reference):
    grid = torch.linspace(-15, 15, 300_001, dtype=torch.float64)
    below = torch.stack([reference.cdf(x.expand(4)) for x in grid[::100]])
    step = (grid[100] - grid[0]).item()
    squared = (below - (grid[::100, None] >= TARGETS).double()).square()
    assert mixture.crps(TARGETS).tolist() == pytest.approx(
        torch.trapezoid(squared, dx=step, dim=0).tolist(), abs=2 * step
    )
    # One Gaussian has a closed form of its own (Gneiting and Raftery, 2007).
    one = GaussianMixture([[0.0]], [[4.0]])
    z = 1.5 / 2
    expected = 2 * (
        z * math.erf(z / math.sqrt(2))
        + 2 * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        - 1 / math.sqrt(math.pi)
    )
    assert one.crps([1.5]).item() == pytest.approx(expected)


def test_crps_of_samples_is_torchmetrics():
    metrics = pytest.importorskip("torchmetrics.regression")
    generator = torch.Generator().manual_seed(7)
    samples = torch.randn(40, 25, generator=generator)
    targets = torch.randn(25, generator=generator)
    metric = metrics.ContinuousRankedProbabilityScore()
    expected = metric(samples.T, targets).item()
    found = GaussianMixture(samples, np.zeros(1)).crps(targets).mean().item()
    assert found == pytest.approx(expected, abs=1e-5)


def test_samples_without_noise_have_the_quantiles_of_their_order():
    samples = torch.arange(10.0).flip(0)[:, None]
    mixture = GaussianMixture(samples, torch.zeros(()))
    assert mixture.cdf([4.0]).item() == 0.5
    assert mixture.quantile(0.05).item() == pytest.approx(0)
    assert mixture.quantile(0.45).item() == pytest.approx(4)
    with pytest.raises(ValueError, match="density needs noise on the targets"):
        mixture.log_density([4.0])


class RandomLine(nn.Module):
    """y = w x with w ~ N(1, 0.5²)."""

    def forward(self, x):
        return x * (1 + 0.5 * torch.randn(()))


def test_intervals_of_a_model_are_those_of_its_predictive_distribution():
    """N(x, 0.25 x² + 0.04), whose quantiles are known."""
    x = torch.tensor([[0.0], [1.0], [3.0]])
    likelihood = zm.GaussianLikelihood(noise_variance=0.04)
    interval = predict_interval(RandomLine(), x, 4000, level=0.8, likelihood=likelihood, seed=0)
    std = (0.25 * x.square() + 0.04).sqrt().double()
    exact = Normal(x.double(), std).icdf(torch.tensor(0.9).double())
    # The quantile of n samples has the standard error √(p (1 − p) / n) / density.
    error = math.sqrt(0.09 / 4000) / 0.175 * std
    assert ((interval.upper - exact).abs() < 4 * error).all()
    assert interval.width[0].item() == pytest.approx(2 * 1.2816 * 0.2, rel=1e-3)
    mixture = predict_mixture(RandomLine(), x, 100, likelihood=likelihood, seed=0)
    moments = zm.predict_moments(RandomLine(), x, 100, likelihood=likelihood, seed=0)
    torch.testing.assert_close(mixture.mean.float(), moments.mean)
    without_bias = mixture.variances.mean(0) + mixture.means.var(0)
    torch.testing.assert_close(without_bias.float(), moments.variance)


def test_coverage_counts_what_is_inside():
    interval = predict_interval(RandomLine(), torch.ones(4, 1), 200, seed=1)
    inside = interval.lower[0].item()
    assert interval.coverage([[inside], [1.0], [-9.0], [9.0]]) == 0.5


def test_what_is_no_mixture_is_refused(mixture):
    with pytest.raises(ValueError, match=r"shape \(num_samples, examples\)"):
        GaussianMixture([1.0], [1.0])
    with pytest.raises(ValueError, match="variances must not be negative, got -1"):
        GaussianMixture([[1.0]], [[-1.0]])
    with pytest.raises(ValueError, match=r"shape of the means, \(1, 2\), got \(1, 3\)"):
        GaussianMixture(np.zeros((1, 2)), np.ones((1, 3)))
    with pytest.raises(ValueError, match="means must be numbers, got 1 NaN"):
        GaussianMixture([[float("nan")]], [[1.0]])
    with pytest.raises(ValueError, match="variances must be finite, got 1 infinite"):
        GaussianMixture([[1.0]], [[float("inf")]])
    for use in (mixture.log_density, mixture.cdf, mixture.crps, mixture.interval().coverage):
        with pytest.raises(ValueError, match=r"shape of the predictions, \(4,\), got \(3,\)"):
            use(TARGETS[1:])
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got 90"):
        predict_interval(RandomLine(), torch.ones(2, 1), level=90)
    with pytest.raises(ValueError, match=r"probability must lie in \(0, 1\), got 0"):
        mixture.quantile(0)
