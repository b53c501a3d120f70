"""Gamma distributions against torch.distributions and scipy."""

import pytest
import torch
from scipy import special

import zeromean as zm
from zeromean.functional import gamma_kl, gamma_quantile

GRID = torch.linspace(-11.0, 4.0, 16)  # of log α: concentrations from e⁻⁴ to e¹¹


def gamma(log_mean, log_alpha):
    concentration = (-log_alpha).exp()
    return torch.distributions.Gamma(concentration, concentration * (-log_mean).exp())


def test_kl_is_that_of_torch():
    log_alpha, prior_log_alpha = (
        t.flatten().double() for t in torch.meshgrid(GRID, GRID, indexing="ij")
    )
    torch.manual_seed(0)
    log_mean, prior_log_mean = torch.randn(2, len(log_alpha), dtype=torch.float64)
    found = gamma_kl(log_mean, log_alpha, prior_log_mean, prior_log_alpha)
    expected = torch.distributions.kl_divergence(
        gamma(log_mean, log_alpha), gamma(prior_log_mean, prior_log_alpha)
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_kl_loses_nothing_in_single_precision():
    log_alpha, prior_log_alpha = (t.flatten() for t in torch.meshgrid(GRID, GRID, indexing="ij"))
    arguments = torch.full_like(log_alpha, 0.3), log_alpha, torch.zeros(256), prior_log_alpha
    expected = gamma_kl(*(a.double() for a in arguments)).float()
    torch.testing.assert_close(gamma_kl(*arguments), expected, rtol=3e-5, atol=3e-5)
    same = gamma_kl(*arguments[:2], *arguments[:2])
    assert same.abs().max() < 1e-5


def test_kl_has_the_gradients_of_its_differences():
    torch.manual_seed(0)
    arguments = [torch.randn(20, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    arguments[1].data[:10] -= 6  # Both sides of where the series begins.
    assert torch.autograd.gradcheck(gamma_kl, arguments)
    assert torch.autograd.gradgradcheck(gamma_kl, arguments)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-8)])
def test_quantiles_are_scipys(dtype, tolerance):
    probability = [6e-8, 1e-4, 0.01, 0.3, 0.5, 0.7, 0.99, 1 - 1e-4, 1 - 6e-8]
    probability = torch.tensor(probability, dtype=torch.float64).to(dtype)
    log_alpha = GRID.to(dtype)[:, None]
    found = gamma_quantile(probability, log_alpha).double()
    concentration = (-log_alpha.double()).exp()
    expected = special.gammaincinv(concentration.numpy(), probability.double().numpy())
    expected = torch.tensor(expected) / concentration
    expected = expected.clamp_min(torch.finfo(dtype).tiny)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-30)


def test_slopes_are_those_of_quantiles():
    probability = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    for value in (-9.0, -4.0, -1.0, 1.0):
        log_alpha = torch.full((25,), value, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(gamma_quantile(probability, log_alpha).sum(), log_alpha)
        step = 1e-4
        above, below = (gamma_quantile(probability, log_alpha + s) for s in (step, -step))
        expected = (above - below) / (2 * step)
        # torch's own implicit gradient has three to four digits.
        assert (slope - expected).norm() < 2e-3 * expected.norm()


def test_quantiles_are_the_same_under_vmap():
    torch.manual_seed(0)
    probability, log_alpha = torch.rand(3, 4, 5), torch.randn(5)
    expected = gamma_quantile(probability, log_alpha)
    for dim in (0, 1):
        mapped = torch.func.vmap(gamma_quantile, (dim, None), dim)
        torch.testing.assert_close(mapped(probability, log_alpha), expected)
    columns = torch.func.vmap(gamma_quantile, (2, 0), 2)
    torch.testing.assert_close(columns(probability, log_alpha), expected)


def test_exponential_is_a_gamma():
    posterior = zm.Exponential((2, 3))
    noise = posterior.draw_noise()
    gamma_posterior = zm.Gamma((2, 3), log_alpha=0.0)
    gamma_posterior.log_mean.data.copy_(posterior.log_mean)
    torch.testing.assert_close(posterior(noise), gamma_posterior(noise))
    for prior in (zm.GammaPrior(0.7, scale=2.0), zm.GammaPrior(learn=True)):
        torch.testing.assert_close(prior.kl(posterior), prior.kl(gamma_posterior))
