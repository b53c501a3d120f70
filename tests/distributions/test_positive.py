"""Gamma and exponential weights, through everything that takes a posterior."""

import copy
from functools import partial

import pytest
import torch
from scipy import stats
from torch import nn

import zeromean as zm

KINDS = {"Gamma": partial(zm.Gamma, log_alpha=-1.0), "Exponential": zm.Exponential}
every_kind = pytest.mark.parametrize("kind", KINDS)


def layer(kind, **options):
    torch.manual_seed(0)
    made = zm.Linear(3, 2, posterior=KINDS[kind], **options)
    if kind == "Gamma":
        nn.init.uniform_(made.weight.log_alpha, -3.0, 1.0)
    return made


def distribution(posterior):
    mean, variance = (t.detach() for t in posterior.moments())
    return torch.distributions.Gamma(mean.square() / variance, mean / variance)


def p_value(drawn, posterior, index):
    """p-value that draws of one weight come from its distribution."""
    known = distribution(posterior)
    shape, rate = (t.flatten()[index].item() for t in (known.concentration, known.rate))
    return stats.kstest(drawn.numpy(), stats.gamma(shape, scale=1 / rate).cdf).pvalue


@every_kind
def test_draws_are_distributed_as_the_name_says(kind):
    posterior = layer(kind).weight
    torch.manual_seed(1)
    with torch.no_grad():
        many = partial(torch.func.vmap, randomness="different")
        drawn = many(lambda _: posterior.sample())(torch.empty(4000))
        noise = many(lambda _: posterior.draw_noise())(torch.empty(4000))
    for draws in (drawn, posterior(noise).detach()):
        assert (draws > 0).all()
        for index in range(6):
            assert p_value(draws.flatten(1)[:, index], posterior, index) > 1e-3


@every_kind
@pytest.mark.parametrize(
    "prior", [zm.GammaPrior(2.5, scale=0.4), zm.GammaPrior(0.3), zm.GammaPrior(scale=3.0)], ids=str
)
def test_kl_is_that_of_torch(kind, prior):
    made = layer(kind, prior=prior)
    there = torch.distributions.Gamma(prior.concentration, 1 / prior.scale)
    expected = torch.distributions.kl_divergence(distribution(made.weight), there).sum()
    torch.testing.assert_close(zm.kl_divergence(made), expected)


def test_kl_to_an_exponential_prior_is_that_of_torch():
    made = layer("Exponential", prior=zm.GammaPrior(scale=0.2))
    mean, _ = made.weight.moments()
    expected = torch.distributions.kl_divergence(
        torch.distributions.Exponential(1 / mean.detach()), torch.distributions.Exponential(5.0)
    )
    torch.testing.assert_close(zm.kl_divergence(made), expected.sum())


@every_kind
def test_kl_with_a_learned_scale_is_the_smallest(kind):
    made = layer(kind, prior=zm.GammaPrior(2.0, learn=True))
    found = zm.kl_divergence(made)
    kls = [zm.GammaPrior(2.0, s).kl(made.weight) for s in torch.linspace(0.02, 1, 500).tolist()]
    assert found <= min(kls) + 1e-6
    torch.testing.assert_close(found, min(kls), rtol=1e-3, atol=1e-3)


@every_kind
@pytest.mark.parametrize("route", ["sample", "noise"])
def test_gradients_of_expectations_are_right(kind, route):
    """E w² = mean² (1 + α), whose derivatives by log mean and log α are known."""
    posterior = layer(kind).weight.double()
    torch.manual_seed(2)
    names, parameters = zip(*posterior.named_parameters(), strict=True)
    gradients = []
    for _ in range(2000 if route == "sample" else 400):
        weight = posterior.sample() if route == "sample" else posterior(posterior.draw_noise())
        gradients.append(torch.autograd.grad(weight.square().sum(), parameters))
    mean, variance = (t.detach() for t in posterior.moments())
    expected = {"log_mean": 2 * (mean.square() + variance), "log_alpha": variance}
    for index, name in enumerate(names):
        draws = torch.stack([g[index] for g in gradients])
        error = draws.std(0) / len(draws) ** 0.5
        assert ((draws.mean(0) - expected[name]).abs() < 5 * error).all()


@every_kind
def test_it_learns_positive_weights_predicts_saves_and_loads(kind, tmp_path):
    torch.manual_seed(0)
    x, weight = torch.rand(200, 3), torch.tensor([[2.0, 0.1, 0.5], [0.2, 1.0, 0.05]])
    y = x @ weight.T
    model = nn.Sequential(zm.Linear(3, 2, bias=False, posterior=KINDS[kind]))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    sampler = zm.weight if kind == "Gamma" else zm.moment_matched
    for _ in range(250):
        with zm.sampling(model, sampler):
            nll = 50 * nn.functional.mse_loss(model(x), y)
        loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=len(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if kind == "Gamma":  # Exponential weights cannot be sure.
        torch.testing.assert_close(model[0].weight.mean_weight(), weight, atol=0.2, rtol=0.1)
    outputs = zm.sample_outputs(model, x, 20, seed=0)
    zm.save(model, tmp_path / "m.safetensors")
    loaded = zm.load(tmp_path / "m.safetensors", nn.Sequential(nn.Linear(3, 2, bias=False)))
    assert isinstance(loaded[0].weight, type(model[0].weight))
    for same in (loaded, copy.deepcopy(model)):
        assert zm.sample_outputs(same, x, 20, seed=0).equal(outputs)
    assert kind in str(zm.summary(model))


@every_kind
def test_predictions_by_moments_are_those_of_samples(kind):
    model, x = nn.Sequential(layer(kind)), torch.randn(4, 3)
    exact = zm.propagate_moments(model, x)
    samples = zm.sample_outputs(model, x, 4000, seed=0)
    error = samples.std(0) / 4000**0.5
    assert ((samples.mean(0) - exact.mean).abs() < 5 * error).all()
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(model(x), exact.mean)
    torch.testing.assert_close(zm.to_deterministic(model)(x), exact.mean)
    zm.prune_(model, by="snr" if kind == "Gamma" else "variance", sparsity=0.5)
    torch.testing.assert_close(zm.compress(model)(x), zm.to_deterministic(model)(x))


@every_kind
def test_held_noise_stays_and_differs_by_example(kind):
    model, x = nn.Sequential(layer(kind)), torch.randn(1, 3).expand(5, 3)
    with zm.held_noise(model):
        assert model(x).equal(model(x))
    with zm.held_noise(model, num_objects=5):
        assert (model(x).std(0) > 0).all()
    noise = zm.draw_noise(model, 7)

    def outputs(noise):
        with zm.held_noise(model, noise):
            return model(x)

    mapped = torch.func.vmap(outputs)(noise)
    one = outputs({name: n[3] for name, n in noise.items()})
    torch.testing.assert_close(mapped[3], one)
    mapped.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own gradient of Gamma
def test_gradients_by_example():
    model, x = nn.Sequential(layer("Gamma")), torch.randn(4, 3)
    parameters = dict(model.named_parameters())

    def loss(parameters, example):
        return torch.func.functional_call(model, parameters, (example,)).sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")(parameters, x)
    assert all(gradient.isfinite().all() for gradient in found.values())


@every_kind
def test_pruned_weights_are_zero_and_have_no_kl(kind):
    made = layer(kind, prior=zm.GammaPrior(), dtype=torch.float64)
    by = "snr" if kind == "Gamma" else "variance"
    zm.prune_(made, by=by, sparsity=0.5)
    mask = made.weight.mask
    assert (made.weight.sample()[~mask] == 0).all()
    assert (made.weight(made.weight.draw_noise())[~mask] == 0).all()
    kl = made.kl()
    there = torch.distributions.Gamma(*torch.ones(2, dtype=torch.float64))
    mean, variance = (t.detach()[mask] for t in made.weight.moments())
    kept = torch.distributions.Gamma(mean.square() / variance, mean / variance)
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(kept, there).sum())
    (made(torch.randn(4, 3).double()).square().sum() + kl).backward()
    for parameter in made.weight.parameters():
        assert (parameter.grad[~mask] == 0).all()
        assert parameter.grad.isfinite().all()
    if kind == "Exponential":
        with pytest.raises(ValueError, match="its weights share their α"):
            zm.prune_(layer(kind), by="snr")


def test_quantization_leaves_it_alone():
    model = nn.Sequential(layer("Gamma"), zm.Linear(2, 2, posterior=zm.Additive))
    assert "weights are positive" in str(zm.quantize_(model))


def test_yesterdays_gamma_is_todays_prior(tmp_path):
    model = nn.Sequential(layer("Gamma"), layer("Exponential"))
    yesterday = [distribution(part.weight) for part in model]
    zm.become_prior_(model)
    torch.testing.assert_close(zm.kl_divergence(model), torch.zeros(()), atol=1e-5, rtol=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
    expected = sum(
        torch.distributions.kl_divergence(distribution(part.weight), before).sum()
        for part, before in zip(model, yesterday, strict=True)
    )
    torch.testing.assert_close(zm.kl_divergence(model), expected)
    zm.save(model, tmp_path / "m.safetensors")
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    loaded = zm.load(tmp_path / "m.safetensors", plain)
    torch.testing.assert_close(zm.kl_divergence(loaded), expected)
    with pytest.raises(ValueError, match="positive weights cannot be compared with others"):
        zm.become_prior_(model, of=nn.Sequential(zm.Linear(3, 2), zm.Linear(3, 2)))


@every_kind
def test_conversion_takes_positive_weights_alone(kind):
    plain = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        plain[0].weight.abs_()
        plain[2].weight.copy_(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    before = copy.deepcopy(plain)
    with pytest.raises(ValueError, match=r"2 has negative weights.*positive; leave the layer out"):
        zm.make_stochastic_(plain, posterior=KINDS[kind])
    assert type(plain[0]) is nn.Linear
    zm.make_stochastic_(plain, posterior=KINDS[kind], where=lambda name, _: name == "0")
    torch.testing.assert_close(plain[0].weight.mean_weight(), before[0].weight)
    x = torch.randn(5, 3)
    with zm.sampling(plain, zm.mean):
        torch.testing.assert_close(plain(x), before(x))


@every_kind
def test_recurrent_layers_attention_and_embeddings_take_it(kind):
    for model, x in (
        (zm.GRU(2, 2, posterior=KINDS[kind]), torch.randn(4, 1, 2)),
        (zm.Embedding(5, 3, padding_idx=1, posterior=KINDS[kind]), torch.tensor([[0, 1, 4]])),
    ):
        output = model(x)
        assert (output[0] if isinstance(output, tuple) else output).isfinite().all()
        assert zm.kl_divergence(model) > 0
    assert (model(x)[0, 1] == 0).all()


@every_kind
def test_what_needs_weights_of_both_signs_is_refused(kind):
    with pytest.raises(ValueError, match=r"zm.local needs normal noise.*moment_matched"):
        layer(kind, sampler=zm.local)
    with pytest.raises(ValueError, match=r"flips signs, which needs symmetric noise"):
        layer(kind, sampler=zm.flipout)
    for prior in (zm.LogUniform(), zm.StudentT(), zm.ARD(), zm.Normal()):
        with pytest.raises(ValueError, match=rf"{kind} has positive weights; use zm.GammaPrior"):
            layer(kind, prior=prior)
    with pytest.raises(ValueError, match="needs uniform noise, from which it makes its own, got"):
        KINDS[kind]((2, 2), noise=zm.normal)
    with pytest.raises(ValueError, match="posterior with means of both signs"):
        zm.add_lora_(nn.Sequential(nn.Linear(4, 4)), rank=2, posterior=KINDS[kind])


def test_the_gamma_prior_is_for_positive_weights():
    with pytest.raises(ValueError, match=r"positive weights, and Additive has weights of both sig"):
        zm.Linear(3, 2, posterior=zm.Additive, prior=zm.GammaPrior())
    with pytest.raises(TypeError, match=r"needs a posterior with positive weights.*ZeroMean; use"):
        zm.GammaPrior().kl(zm.ZeroMean((2, 3)))
    for options in ({"concentration": 0.0}, {"scale": -1.0}, {"scale": float("inf")}):
        with pytest.raises(ValueError, match=f"GammaPrior needs a {next(iter(options))} > 0"):
            zm.GammaPrior(**options)
