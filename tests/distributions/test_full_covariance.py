"""A posterior whose weights depend on each other, through everything that takes a posterior."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.distributions.posteriors import WeightLayout


def layer(**options):
    """A layer whose covariance is not diagonal."""
    made = zm.Linear(3, 2, posterior=zm.FullCovariance, **options)
    with torch.no_grad():
        made.weight.below.normal_(0, 0.3)
        made.weight.log_diagonal.uniform_(-1, 0.5)
    return made


def distribution(posterior):
    mean, factor = posterior.mean.detach().flatten(), posterior.factor().detach()
    return torch.distributions.MultivariateNormal(mean, scale_tril=factor)


def test_kl_is_that_of_two_normals():
    made = layer(prior=zm.Normal(0.7))
    prior = torch.distributions.MultivariateNormal(torch.zeros(6), 0.49 * torch.eye(6))
    expected = torch.distributions.kl_divergence(distribution(made.weight), prior)
    torch.testing.assert_close(zm.kl_divergence(made), expected)


def test_kl_with_a_learned_scale_is_the_smallest():
    made = layer(prior=zm.Normal(learn=True))
    found = zm.kl_divergence(made)
    kls = [zm.Normal(s).kl(made.weight) for s in torch.linspace(0.3, 3, 200).tolist()]
    assert found <= min(kls) + 1e-6
    torch.testing.assert_close(found, min(kls), rtol=1e-3, atol=0)


def test_diagonal_is_additive():
    full = zm.Linear(3, 2, posterior=partial(zm.FullCovariance, log_variance=-2.0))
    additive = zm.Linear(3, 2, posterior=partial(zm.Additive, log_variance=-2.0))
    additive.weight.mean.data.copy_(full.weight.mean)
    for prior in (zm.Normal(0.5), zm.Normal(learn=True)):
        torch.testing.assert_close(prior.kl(full.weight), prior.kl(additive.weight))
    for one, other in zip(full.weight.moments(), additive.weight.moments(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(full.weight.log_determinant(), additive.weight.log_determinant())


def test_draws_have_the_covariance():
    posterior = layer().weight
    drawn = torch.stack([posterior.sample() for _ in range(20_000)]).flatten(1).detach()
    expected = posterior.covariance().detach()
    variances = expected.diag()
    # Of a product of normals: Var = Σii Σjj + Σij².
    errors = ((variances[:, None] * variances + expected.square()) / len(drawn)).sqrt()
    assert ((drawn.T.cov() - expected).abs() < 5 * errors).all()
    assert ((drawn.mean(0) - posterior.mean.flatten()).abs() < 5 * (variances / 2e4).sqrt()).all()


def test_many_weights_come_from_much_noise_at_once():
    posterior = layer().weight
    noise = torch.randn(4, 2, 3)
    torch.testing.assert_close(posterior(noise)[1], posterior(noise[1]))


def test_it_trains_predicts_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = (x[:, 0] - x[:, 1] > 0).long()
    model = nn.Sequential(layer(), nn.ReLU(), zm.Linear(2, 2, posterior=zm.FullCovariance))
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=3e-2))
    beta = zm.linear_warmup(steps=150)
    for step in range(300):
        nll = nn.functional.cross_entropy(model(x), y)
        loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=len(x), beta=beta(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    probabilities = zm.predict_proba(model, x, 50, seed=0)
    assert (probabilities.argmax(-1) == y).float().mean() > 0.9
    zm.save(model, tmp_path / "m.safetensors")
    loaded = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    loaded = zm.load(tmp_path / "m.safetensors", loaded)
    assert zm.predict_proba(loaded, x, 50, seed=0).equal(probabilities)
    assert isinstance(loaded[0].weight, zm.FullCovariance)
    copied = copy.deepcopy(model)
    assert zm.predict_proba(copied, x, 50, seed=0).equal(probabilities)


def test_held_noise_and_means():
    model = nn.Sequential(layer())
    x = torch.randn(5, 3)
    with zm.held_noise(model):
        assert model(x).equal(model(x))
    with zm.sampling(model, zm.mean):
        expected = nn.functional.linear(x, model[0].weight.mean, model[0].bias)
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(zm.to_deterministic(model)(x), expected)


def test_conversion_keeps_weights_as_means():
    plain = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    before = plain[0].weight.detach().clone()
    zm.make_stochastic_(plain, posterior=zm.FullCovariance, prior=zm.Normal())
    assert plain[0].weight.mean.equal(before)


def test_recurrent_layers_take_it():
    model = zm.GRU(2, 2, posterior=zm.FullCovariance, prior=zm.Normal())
    assert model(torch.randn(4, 1, 2))[0].shape == (4, 1, 2)
    assert zm.kl_divergence(model) > 0


def test_a_mask_takes_weights_and_their_noise_away():
    posterior = layer().weight
    kept = torch.tensor([[True, False, True], [True, True, False]])
    posterior.mask = kept
    assert not posterior.sample()[~kept].any()
    covariance = posterior.covariance()[kept.flatten()][:, kept.flatten()]
    torch.testing.assert_close(posterior.log_determinant(), covariance.logdet())
    marginal = torch.distributions.MultivariateNormal(posterior.mean[kept].detach(), covariance)
    prior = torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4))
    expected = torch.distributions.kl_divergence(marginal, prior)
    torch.testing.assert_close(zm.Normal().kl(posterior), expected)


def test_samplers_that_take_weights_for_independent_are_refused():
    with pytest.raises(ValueError, match=r"independent, which those of FullCovariance are not"):
        layer(sampler=zm.flipout)
    with pytest.raises(ValueError, match=r"use sampler=zm.weight"):
        zm.predict_proba(nn.Sequential(layer()), torch.randn(2, 3), sampler=zm.flipout)


@pytest.mark.parametrize("prior", [zm.LogUniform(), zm.StudentT(), zm.ARD()])
def test_priors_of_independent_weights_are_refused(prior):
    with pytest.raises(ValueError, match=r"is for independent weights.*use zm.Normal"):
        layer(prior=prior)
    with pytest.raises(TypeError, match="needs a posterior with independent weights"):
        prior.kl(layer().weight)


def test_what_asks_weights_one_by_one_leaves_it_alone():
    model = nn.Sequential(layer())
    with pytest.raises(ValueError, match="its weights depend on each other"):
        zm.prune_(model)
    with pytest.raises(ValueError, match="found no stochastic layer with means"):
        zm.zero_mean_(model)
    report = zm.quantize_(nn.Sequential(layer(), zm.Linear(2, 2, posterior=zm.Additive)))
    assert "depend on each other" in str(report)
    zm.clip_log_alpha_(model, high=0.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shape": (100, 100)}, "at most 4096 weights, got .*10000; use zm.Additive"),
        ({"shape": (2, 2), "noise": zm.uniform}, "needs normal noise, got uniform"),
        (
            {"shape": (2, 2), "layout": WeightLayout(noiseless_row=0)},
            "padding_idx needs a row without noise",
        ),
    ],
)
def test_what_it_is_not_for_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        zm.FullCovariance(**options)


def test_a_subclass_as_version_0_1_had_it_still_has_independent_weights():
    with pytest.warns(DeprecationWarning, match=r"subclass of zm.FactorizedPosterior"):

        class Old(zm.Posterior):
            def mean_and_scale(self, rows=None):
                return None, torch.ones(self.shape)

    assert issubclass(Old, zm.FactorizedPosterior)
    old = Old((2, 3), zm.normal, WeightLayout())
    assert old.moments()[1].equal(torch.ones(2, 3))
    assert old.sample().shape == (2, 3)
