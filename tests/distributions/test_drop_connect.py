"""Binary noise on weights."""

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.distributions.posteriors import WeightLayout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_weights_are_there_or_not(p):
    torch.manual_seed(0)
    posterior = zm.DropConnect((3, 4), p=p)
    drawn = torch.stack([posterior.sample() for _ in range(10_000)]).detach()
    mean, variance = (moment.detach() for moment in posterior.moments())
    there = drawn != 0
    torch.testing.assert_close(drawn[there], (mean / (1 - p)).expand_as(drawn)[there])
    error = (p * (1 - p) / len(drawn)) ** 0.5
    assert ((there.double().mean(0) - (1 - p)).abs() < 5 * error).all()
    torch.testing.assert_close(variance, mean.square() * p / (1 - p))
    torch.testing.assert_close(
        posterior.log_alpha_per_weight().exp(), torch.full((3, 4), p / (1 - p))
    )


def test_outputs_have_the_moments_of_the_normal_approximation():
    torch.manual_seed(0)
    layer = zm.Linear(30, 2, posterior=zm.DropConnect)
    x = torch.randn(1, 30)
    drawn = torch.stack([layer(x) for _ in range(8000)]).detach().squeeze(1)
    mean, variance = layer.linear_map().moments(x, layer.weight, layer.bias)
    mean, variance = mean.detach()[0], variance.detach()[0]
    assert ((drawn.mean(0) - mean).abs() < 5 * (variance / len(drawn)).sqrt()).all()
    assert ((drawn.var(0) / variance - 1).abs() < 5 * (2 / len(drawn)) ** 0.5).all()


def test_the_padding_row_of_an_embedding_has_no_noise():
    layer = zm.Embedding(5, 3, padding_idx=1, posterior=zm.DropConnect)
    with torch.no_grad():
        layer.weight.mean[1] = 2.0
    assert torch.equal(layer.weight.sample()[1], layer.weight.mean[1])


def test_it_is_converted_to_saved_with_its_rate_and_made_plain(tmp_path):
    def plain():
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

    model, x = plain(), torch.randn(5, 4)
    expected = model(x)
    zm.make_stochastic_(model, posterior=lambda shape, **o: zm.DropConnect(shape, p=0.25, **o))
    with zm.sampling(model, zm.mean):
        assert torch.equal(model(x), expected)
    zm.save(model, tmp_path / "m.safetensors")
    loaded = zm.load(tmp_path / "m.safetensors", plain())
    assert loaded[0].weight.p == 0.25
    assert torch.equal(zm.predict_proba(loaded, x, seed=0), zm.predict_proba(model, x, seed=0))
    assert zm.kl_divergence(loaded) == 0
    assert torch.equal(zm.to_deterministic(model)(x), expected)


def test_nothing_is_pruned_by_a_rate_that_all_share():
    model = nn.Sequential(zm.Linear(4, 6, posterior=lambda s, **o: zm.DropConnect(s, p=0.99, **o)))
    with pytest.raises(ValueError, match="its weights share their α"):
        zm.prune_(model)
    assert zm.summary(model)["0"].prunable is None


def test_what_does_not_fit_is_refused():
    for p in (1.0, -0.1):
        with pytest.raises(ValueError, match=rf"p must lie in \[0, 1\), got {p}"):
            zm.DropConnect((2, 2), p=p)
    with pytest.raises(ValueError, match=r"from uniform noise.*got normal"):
        zm.DropConnect((2, 2), noise=zm.normal, layout=WeightLayout())
    with pytest.raises(ValueError, match="flipout flips signs, which needs symmetric noise"):
        zm.Linear(2, 2, posterior=zm.DropConnect, sampler=zm.flipout)
    with pytest.raises(ValueError, match="needs normal noise"):
        zm.Linear(2, 2, posterior=zm.DropConnect, prior=zm.Normal())
    model = nn.Sequential(zm.Linear(2, 2, posterior=zm.DropConnect))
    with pytest.raises(ValueError, match="cannot become a prior: its noise is uniform"):
        zm.become_prior_(model)
