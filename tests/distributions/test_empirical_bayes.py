"""Prior scales that are learned, against minima over the scale and torch's densities."""

from functools import partial

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.distributions import InverseGamma, kl_divergence
from torch.distributions import Normal as TorchNormal

import zeromean as zm

KNOWN = zm.InverseGamma(2.0, 0.3)


def noisy(layer):
    """A layer whose weights have variances of many sizes."""
    with torch.no_grad():
        layer.weight.log_variance.uniform_(-6, 1)
    return layer


def layers(prior, dtype=torch.float64):
    torch.manual_seed(0)
    options = {"posterior": zm.Additive, "prior": prior, "dtype": dtype}
    return {
        "Linear": noisy(zm.Linear(5, 3, **options)),
        "Conv2d": noisy(zm.Conv2d(4, 6, 3, groups=2, **options)),
        "ConvTranspose2d": noisy(zm.ConvTranspose2d(4, 6, 3, groups=2, **options)),
        "Embedding": noisy(zm.Embedding(6, 4, padding_idx=2, **options)),
    }


def shares_of(layer, per):
    """The number of the scale of every weight, by the posterior that shares α alike."""
    posterior = zm.Multiplicative(
        layer.weight.shape, share=per, layout=layer.weight.layout, dtype=torch.float64
    )
    with torch.no_grad():
        count = posterior.log_alpha.numel()
        posterior.log_alpha.copy_(torch.arange(count).view_as(posterior.log_alpha))
    return posterior._broadcastable_log_alpha().detach().expand(posterior.shape)


def smallest_kl(posterior, shares, hyperprior):
    """Minimised over each scale by itself, by brute force."""
    mean, variance = (moment.detach() for moment in posterior.moments())
    total = 0.0
    for share in shares.unique():
        chosen = shares == share
        if posterior.layout.noiseless_row is not None:
            chosen = chosen.clone()
            chosen[posterior.layout.noiseless_row] = False
        if posterior.mask is not None:
            chosen = chosen & posterior.mask
        if not chosen.any():
            continue
        q = TorchNormal(mean[chosen], variance[chosen].sqrt())

        def loss(log_variance, q=q):
            v = torch.tensor(log_variance, dtype=torch.float64).exp()
            value = kl_divergence(q, TorchNormal(torch.zeros_like(v), v.sqrt())).sum()
            if hyperprior is not None:
                value -= InverseGamma(
                    torch.tensor(hyperprior.shape).double(), torch.tensor(hyperprior.scale).double()
                ).log_prob(v)
            return value.item()

        total += minimize_scalar(
            loss, bounds=(-12, 6), method="bounded", options={"xatol": 1e-7}
        ).fun
    return total


@pytest.mark.parametrize("hyperprior", [None, KNOWN])
@pytest.mark.parametrize("per", ["layer", "neuron", "weight"])
def test_kl_is_the_smallest_over_the_scales(per, hyperprior):
    prior = zm.Normal(learn=True, per=per, hyperprior=hyperprior)
    for name, layer in layers(prior).items():
        expected = smallest_kl(layer.weight, shares_of(layer, per), hyperprior)
        assert layer.kl().item() == pytest.approx(expected, abs=1e-4), name
        layer.weight.mask = torch.rand(layer.weight.shape) > 0.6
        layer.weight.mask[0] = False
        expected = smallest_kl(layer.weight, shares_of(layer, per), hyperprior)
        assert layer.kl().item() == pytest.approx(expected, abs=1e-4), name


@pytest.mark.parametrize("per", ["layer", "neuron", "weight"])
def test_gradient_is_that_at_a_fixed_scale(per):
    prior = zm.Normal(learn=True, per=per, hyperprior=KNOWN)
    layer = layers(prior)["Linear"]
    layer.kl().backward()
    variance = prior.learned_variance(layer.weight).detach()
    variance = variance.unsqueeze(1) if per == "neuron" else variance
    mean = layer.weight.mean.detach().clone().requires_grad_()
    log_variance = layer.weight.log_variance.detach().clone().requires_grad_()
    q = TorchNormal(mean, (log_variance / 2).exp())
    fixed = TorchNormal(torch.zeros_like(mean), variance.sqrt().expand_as(mean))
    kl_divergence(q, fixed).sum().backward()
    torch.testing.assert_close(layer.weight.mean.grad, mean.grad)
    torch.testing.assert_close(layer.weight.log_variance.grad, log_variance.grad)


def test_a_scale_for_every_weight_is_ard():
    by_weight = layers(zm.Normal(learn=True, per="weight"))["Linear"]
    relevance = layers(zm.ARD())["Linear"]
    assert by_weight.kl().item() == relevance.kl().item()
    mean, variance = by_weight.weight.moments()
    learned = by_weight.prior.learned_variance(by_weight.weight)
    torch.testing.assert_close(learned, mean.square() + variance)


def test_a_sure_hyperprior_is_a_fixed_scale():
    shape, scale = 1e7, 0.4
    prior = zm.Normal(learn=True, per="neuron", hyperprior=zm.InverseGamma(shape, scale**2 * shape))
    layer = layers(prior)["Linear"]
    variance = prior.learned_variance(layer.weight)
    torch.testing.assert_close(variance, torch.full((3,), scale**2).double(), rtol=1e-5, atol=0)
    density = InverseGamma(torch.tensor(KNOWN.shape), torch.tensor(KNOWN.scale))
    points = torch.tensor([0.01, 0.1, 1.0])
    torch.testing.assert_close(KNOWN.log_density(points), density.log_prob(points))


def test_a_scale_for_every_weight_follows_the_noise_and_a_hyperprior_does_not():
    """The lecture's warning: with as many scales as weights p = q = δ costs next to nothing."""
    torch.manual_seed(0)
    kls = {}
    for name, hyperprior in (("alone", None), ("with", KNOWN)):
        for per in ("layer", "weight"):
            prior = zm.Normal(learn=True, per=per, hyperprior=hyperprior)
            layer = zm.Linear(20, 20, posterior=zm.Additive, prior=prior)
            with torch.no_grad():
                layer.weight.mean.normal_(0, 0.01)
                layer.weight.log_variance.fill_(-12.0)
                before = layer.kl()
                layer.weight.mean[:, :2] += 5.0  # Forty weights that learn something by heart.
                kls[name, per] = (layer.kl() - before).item() / 40
    # In nats for each such weight: the log of its size against a scale that all must agree on.
    assert kls["alone", "weight"] < 7
    assert kls["with", "weight"] > 1.5 * kls["alone", "weight"]
    assert kls["alone", "layer"] > 2 * kls["alone", "weight"]


def test_weights_that_depend_on_each_other_share_one_scale():
    torch.manual_seed(0)
    prior = zm.Normal(learn=True, hyperprior=KNOWN)
    layer = zm.Linear(3, 2, posterior=zm.FullCovariance, prior=prior, dtype=torch.float64)
    covariance = layer.weight.factor() @ layer.weight.factor().mT
    q = torch.distributions.MultivariateNormal(layer.weight.mean.flatten(), covariance)

    def loss(variance):
        p = torch.distributions.MultivariateNormal(torch.zeros(6).double(), variance * torch.eye(6))
        return kl_divergence(q, p) - KNOWN.log_density(variance)

    best = prior.learned_variance(layer.weight).detach()
    assert layer.kl().item() == pytest.approx(loss(best).item())
    assert min(loss(best * 1.01), loss(best / 1.01)) > loss(best)
    with pytest.raises(TypeError, match=r"per='neuron'.* needs a posterior with independent"):
        zm.Linear(3, 2, posterior=zm.FullCovariance, prior=zm.Normal(learn=True, per="neuron")).kl()


def test_files_know_what_is_learned(tmp_path):
    priors = [
        zm.Normal(0.5),
        zm.Normal(learn=True),
        zm.Normal(learn=True, per="neuron"),
        zm.Normal(learn=True, per="weight", hyperprior=KNOWN),
    ]
    layer = partial(zm.Linear, posterior=zm.Additive)
    model = nn.Sequential(*(layer(4, 4, prior=prior) for prior in priors))
    zm.save(model, tmp_path / "m.safetensors")
    loaded = zm.load(tmp_path / "m.safetensors", nn.Sequential(*(nn.Linear(4, 4) for _ in priors)))
    assert [each.prior for each in loaded] == priors
    torch.testing.assert_close(zm.kl_divergence(loaded), zm.kl_divergence(model))
    assert [repr(each.prior) for each in loaded] == [
        "Normal(scale=0.5, learn=False)",
        "Normal(scale=1.0, learn=True)",
        "Normal(scale=1.0, learn=True, per='neuron')",
        "Normal(scale=1.0, learn=True, per='weight', "
        "hyperprior=InverseGamma(shape=2.0, scale=0.3))",
    ]


def test_what_cannot_be_learned_is_refused():
    with pytest.raises(ValueError, match="per must be one of layer, neuron, weight"):
        zm.Normal(learn=True, per="unit")
    with pytest.raises(ValueError, match=r"per= and hyperprior= .* say learn=True"):
        zm.Normal(per="weight")
    with pytest.raises(ValueError, match=r"per= and hyperprior= .* say learn=True"):
        zm.Normal(hyperprior=KNOWN)
    with pytest.raises(TypeError, match=r"hyperprior must be a zm\.InverseGamma or None, got 2"):
        zm.Normal(learn=True, hyperprior=2)
    with pytest.raises(ValueError, match="InverseGamma needs a shape > 0"):
        zm.InverseGamma(0.0, 1.0)
    with pytest.raises(ValueError, match="InverseGamma needs a scale > 0"):
        zm.InverseGamma(1.0, float("inf"))
    with pytest.raises(TypeError, match="shape must be a number"):
        zm.InverseGamma("2", 1.0)
    with pytest.raises(ValueError, match=r"is not learned; it is 0\.5"):
        zm.Normal(0.5).learned_variance(zm.Additive((2, 2)))
