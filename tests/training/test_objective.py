import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributions import Normal as TorchNormal
from torch.distributions import kl_divergence as torch_kl

import zeromean as zm
from cases import POSTERIORS, PRIORS, build, is_allowed, is_normal
from zeromean.distributions.posteriors.posterior import WeightLayout

every_noisy_prior = pytest.mark.parametrize(
    "prior", [p for p in PRIORS if p != "None" and is_allowed("Additive", p, "weight")]
)


def moments(layer):
    mean, variance = layer.weight.moments()
    return torch.zeros_like(variance) if mean is None else mean, variance


@pytest.mark.parametrize("posterior", ["ZeroMean", "Multiplicative-neuron", "Additive"])
def test_normal_prior_is_torch_distributions(posterior):
    layer = build("Conv2d", posterior, "Normal", dtype=torch.float64)
    mean, variance = moments(layer)
    expected = torch_kl(TorchNormal(mean, variance.sqrt()), TorchNormal(0.0, 0.5)).sum()
    torch.testing.assert_close(layer.kl(), expected)


@pytest.mark.parametrize("posterior", ["ZeroMean", "Multiplicative-neuron", "Additive"])
def test_learned_normal_prior_is_the_best_fixed_one(posterior):
    layer = build("Conv2d", posterior, "Normal-learn", dtype=torch.float64)
    scales = torch.linspace(0.02, 2, 2000).tolist()
    best = min(zm.Normal(scale=s).kl(layer.weight).item() for s in scales)
    assert layer.kl().item() <= best
    assert layer.kl().item() == pytest.approx(best, rel=1e-3)


def test_ard_is_the_kl_to_the_best_prior_of_each_weight():
    layer = build("Linear", "Additive", "ARD", dtype=torch.float64)
    mean, variance = moments(layer)
    best = (mean.square() + variance).sqrt()
    expected = torch_kl(TorchNormal(mean, variance.sqrt()), TorchNormal(0.0, best)).sum()
    torch.testing.assert_close(layer.kl(), expected)


@pytest.mark.parametrize("prior", ["LogUniform", "LogUniform-approx", "LogUniform-sample", "ARD"])
def test_zero_mean_layer_has_zero_kl(prior):
    assert build("Linear", "ZeroMean", prior).kl() == 0


@pytest.mark.parametrize("share", ["layer", "neuron", "weight"])
def test_kl_counts_every_weight_that_shares_an_alpha(share):
    layer = build("Conv2d", f"Multiplicative-{share}", "LogUniform", dtype=torch.float64)
    nn.init.normal_(layer.weight.log_alpha)
    log_alpha = layer.weight.log_alpha_per_weight()
    assert log_alpha.shape == layer.weight.shape
    expected = zm.functional.log_uniform_kl((-log_alpha).exp()).sum()
    torch.testing.assert_close(layer.kl(), expected)


@pytest.mark.parametrize("posterior", ["Multiplicative-weight", "Additive"])
@every_noisy_prior
@pytest.mark.parametrize("log_alpha", [-60.0, -20.0, 0.0, 20.0, 60.0])
def test_kl_and_gradient_are_finite_in_float32(posterior, prior, log_alpha):
    layer = build("Linear", posterior, prior)
    with torch.no_grad():
        layer.weight.mean.copy_(torch.linspace(-0.5, 0.5, 24).view(4, 6))
        if posterior == "Additive":
            layer.weight.mean[0] = 0.0
            layer.weight.log_variance.copy_(layer.weight.mean.square().clamp_min(0.1).log())
            layer.weight.log_variance.add_(log_alpha)
        else:
            layer.weight.log_alpha.fill_(log_alpha)
    value = layer.kl()
    value.backward()
    assert value.isfinite()
    grads = [p.grad for p in layer.weight.parameters() if p.grad is not None]
    assert grads
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("posterior", [p for p in POSTERIORS if is_normal(p)])
@pytest.mark.parametrize("exact", ["LogUniform", "StudentT"])
def test_sampled_kl_averages_to_the_exact_one(posterior, exact):
    layer = build("Linear", posterior, f"{exact}-sample", dtype=torch.float64)
    draws = torch.stack([layer.kl() for _ in range(2000)]).detach()
    error = (draws.mean() - PRIORS[exact].kl(layer.weight)).abs()
    assert error <= 4 * draws.std() / 2000**0.5 + 1e-12


def test_kl_divergence_sums_layers_once_each():
    shared = zm.Linear(4, 4, posterior=zm.Additive)
    model = nn.Sequential(shared, nn.ReLU(), shared, zm.Linear(4, 2, prior=None))
    tied = zm.Linear(4, 4, posterior=zm.Additive)
    tied.weight = shared.weight
    model.append(tied)
    torch.testing.assert_close(zm.kl_divergence(model), shared.kl())
    assert set(zm.kl_by_layer(model)) == {"0"}


def test_kl_divergence_of_a_deterministic_model_is_a_zero_tensor():
    kl = zm.kl_divergence(nn.Linear(2, 2, dtype=torch.float64))
    assert kl == 0
    assert kl.dtype == torch.float64
    assert zm.kl_divergence(nn.ReLU()) == 0


def test_elbo_loss_is_the_negative_elbo_over_the_number_of_objects():
    nll, kl = torch.tensor(0.7), torch.tensor(300.0)
    assert zm.elbo_loss(nll, kl, num_data=1000).item() == pytest.approx(1.0)
    assert zm.elbo_loss(nll, kl, num_data=1000, beta=1 / 3).item() == pytest.approx(0.8)


@pytest.mark.parametrize("num_data", [0, -5])
def test_elbo_loss_refuses_a_wrong_number_of_objects(num_data):
    with pytest.raises(ValueError, match=f"num_data must be .* training set.*{num_data}"):
        zm.elbo_loss(torch.tensor(1.0), torch.tensor(1.0), num_data=num_data)


def test_elbo_loss_refuses_a_negative_beta():
    with pytest.raises(ValueError, match="beta must be a finite number of at least 0, got -1"):
        zm.elbo_loss(torch.tensor(1.0), torch.tensor(1.0), num_data=1, beta=-1)


@pytest.mark.parametrize("schedule", [zm.linear_warmup, zm.cosine_warmup])
def test_warmup_rises_from_start_to_end(schedule):
    beta = schedule(10, start=0.1, end=0.5)
    values = [beta(step) for step in range(15)]
    assert values[0] == pytest.approx(0.1)
    assert values[5] == pytest.approx(0.3)
    assert values[10:] == pytest.approx([0.5] * 5)
    assert values == sorted(values)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        schedule(0)


def test_a_posterior_that_cannot_clip_its_log_alpha_says_so():
    class Own(zm.FactorizedPosterior):
        pass

    model = nn.Sequential(Own((2, 3), zm.normal, WeightLayout()))
    with pytest.raises(NotImplementedError, match=r"Own does not say .* clip_log_alpha_"):
        zm.clip_log_alpha_(model, high=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_without_a_prior_the_kl_has_the_type_of_any_other(dtype):
    kinds = {
        zm.kl_divergence(nn.Linear(3, 2, dtype=dtype)).dtype,
        zm.Linear(3, 2, prior=None, dtype=dtype).kl().dtype,
        zm.Linear(3, 2, posterior=zm.Additive, dtype=dtype).kl().dtype,
        zm.Linear(3, 2, dtype=dtype).kl().dtype,
    }
    assert kinds == {torch.promote_types(dtype, torch.float32)}


def test_clip_log_alpha_projects_and_lets_alpha_come_back():
    model = nn.Sequential(
        zm.Linear(3, 2, posterior=partial(zm.Multiplicative, log_alpha=0.5)),
        zm.Linear(2, 2, posterior=partial(zm.Additive, log_variance=4.0)),
    )
    zm.clip_log_alpha_(model, high=0.0)
    assert model[0].weight.log_alpha == 0
    torch.testing.assert_close(
        model[1].weight.log_alpha_per_weight(), torch.zeros(2, 2), atol=1e-5, rtol=0
    )
    (model[0].weight.log_alpha * 2).backward()
    assert model[0].weight.log_alpha.grad == 2
    with pytest.raises(ValueError, match="low must not exceed high"):
        zm.clip_log_alpha_(model, low=1.0, high=0.0)


def test_parameter_groups_cover_every_parameter_once_and_spare_the_noise_from_decay():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        zm.Conv2d(2, 2, 3),
        zm.Linear(4, 4, posterior=zm.Additive),
        zm.Linear(4, 4, posterior=partial(zm.Multiplicative, share="neuron")),
    )
    model[0].bias.requires_grad_(False)
    groups = zm.parameter_groups(model, lr=1e-3, log_alpha_lr=1e-2, weight_decay=0.1)
    by_name = {group["name"]: group for group in groups}
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    decayed = {id(p) for p in by_name["weights"]["params"]}
    assert decayed == {id(model[0].weight), id(model[3].weight.mean), id(model[4].weight.mean)}
    assert id(model[2].weight.scale) in {id(p) for p in by_name["undecayed"]["params"]}
    fast = {id(p) for p in by_name["log_alpha"]["params"]}
    assert fast == {id(model[3].weight.log_variance), id(model[4].weight.log_alpha)}
    assert (by_name["log_alpha"]["lr"], by_name["weights"]["lr"]) == (1e-2, 1e-3)
    assert by_name["log_alpha"]["weight_decay"] == by_name["undecayed"]["weight_decay"] == 0
    torch.optim.AdamW(groups).step()
    groups = zm.parameter_groups(model, lr=1e-3, weight_decay=0.1, scale_decay=0.2)
    by_name = {group["name"]: group for group in groups}
    assert [id(p) for p in by_name["scales"]["params"]] == [id(model[2].weight.scale)]
    assert (by_name["scales"]["weight_decay"], by_name["scales"]["lr"]) == (0.2, 1e-3)
    assert zm.parameter_groups(model[2], lr=1e-3, scale_lr=1e-2)[-1]["lr"] == 1e-2
    for optimizer in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        optimizer(groups).step()


def test_log_alpha_betas_let_log_alpha_rise():
    """The gradient of the KL falls off as log α rises, and Adam's memory holds it back."""

    def rise(betas):
        layer = zm.Linear(20, 20, posterior=zm.Multiplicative)
        groups = zm.parameter_groups(layer, lr=1e-3, log_alpha_lr=0.03, log_alpha_betas=betas)
        optimizer = torch.optim.Adam(groups, eps=1e-12)
        for _ in range(1500):
            optimizer.zero_grad()
            zm.kl_divergence(layer).backward()
            optimizer.step()
        return layer.weight.log_alpha.item()

    assert rise(None) < 6
    assert rise((0.9, 0.95)) > 12


def test_homoscedastic_likelihood_is_torch_distributions_and_learns_the_noise():
    likelihood = zm.GaussianLikelihood(2, noise_variance=0.25)
    outputs, targets = torch.randn(500, 2), torch.randn(500, 2)
    expected = -TorchNormal(outputs, 0.5).log_prob(targets).sum(-1).mean()
    torch.testing.assert_close(likelihood.nll(outputs, targets), expected)
    targets = outputs + torch.tensor([0.3, 2.0]) * torch.randn(500, 2)
    optimizer = torch.optim.LBFGS(likelihood.parameters(), max_iter=50)

    def closure():
        optimizer.zero_grad()
        loss = likelihood.nll(outputs, targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    learned = likelihood.log_noise_variance.exp()
    torch.testing.assert_close(learned, (targets - outputs).square().mean(0), rtol=1e-3, atol=0)


def test_heteroscedastic_likelihood_is_torch_distributions():
    likelihood = zm.HeteroscedasticGaussianLikelihood()
    mean, log_variance, targets = torch.randn(3, 50, 2).unbind()
    expected = -TorchNormal(mean, (0.5 * log_variance).exp()).log_prob(targets).sum(-1).mean()
    torch.testing.assert_close(
        likelihood.nll(torch.cat([mean, log_variance], -1), targets), expected
    )
    with pytest.raises(ValueError, match=r"even last dimension.*\(5, 3\)"):
        likelihood.nll(torch.zeros(5, 3), torch.zeros(5, 3))


def test_likelihood_refuses_targets_that_would_broadcast():
    with pytest.raises(ValueError, match=r"shape of the predicted means, \(5, 1\), got \(5,\)"):
        zm.GaussianLikelihood().nll(torch.zeros(5, 1), torch.zeros(5))
    with pytest.raises(ValueError, match="noise_variance must be positive, got 0"):
        zm.GaussianLikelihood(noise_variance=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zm.LogUniform(kl="fast"), "kl must be one of exact, approx, sample"),
        (lambda: zm.StudentT(kl="exact"), "kl must be one of quadrature, sample"),
        (lambda: zm.StudentT(df=0), "df > 0, got 0; for the limit 0 use LogUniform"),
        (lambda: zm.Normal(scale=0), "scale > 0, got 0"),
        (lambda: zm.Multiplicative((2, 2), share="row"), "one of layer, neuron, weight, got 'row'"),
        (lambda: zm.Multiplicative((2, 2), log_alpha=math.nan), "log_alpha must be a finite"),
        (lambda: zm.Additive((2, 2), log_variance=math.inf), "log_variance must be a finite"),
        (lambda: zm.Linear(0, 2), "in_features must be at least 1, got 0"),
        (lambda: zm.Conv2d(1, 0, 3), "out_channels must be at least 1, got 0"),
        (lambda: zm.Embedding(3, 2, padding_idx=5), "within the 3 embeddings, got 5"),
    ],
)
def test_construction_refuses_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zm.Linear(2, 2, sampler="gibbs"), "sampler must be a function, got 'gibbs'"),
        (lambda: zm.Linear(2, 2, prior="flat"), r"prior must have a method kl\(posterior\)"),
        (lambda: zm.ZeroMean((2, 2), noise="normal"), "noise must be a function, got 'normal'"),
        (lambda: zm.Embedding(3, 2)(torch.randn(2)), "indices of dtype int64 or int32"),
    ],
)
def test_construction_refuses_bad_types(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (lambda: zm.Linear(3, 2), (4, 5), r"\(\*, 3\), got \(4, 5\)"),
        (lambda: zm.Conv1d(3, 2, 1), (2, 4, 8), r"\(N, 3, W\) or \(3, W\), got \(2, 4, 8\)"),
        (lambda: zm.Conv2d(3, 2, 1), (8, 8), r"\(N, 3, H, W\).*got \(8, 8\)"),
        (lambda: zm.Conv3d(3, 2, 1), (2, 4, 8, 8, 8), r"\(N, 3, D, H, W\)"),
        (lambda: zm.ConvTranspose2d(3, 2, 1), (2, 2, 8, 8), r"ConvTranspose2d needs an input"),
    ],
)
def test_forward_refuses_a_wrong_rank_or_channel_count(layer, shape, message):
    with pytest.raises(ValueError, match=message):
        layer()(torch.randn(shape))


@pytest.mark.parametrize("posterior", ["ZeroMean", "Multiplicative-layer", "Multiplicative-neuron"])
@pytest.mark.parametrize("prior", ["LogUniform", "StudentT", "ARD", "Normal", "Normal-learn"])
def test_padding_row_does_not_count_in_the_kl(posterior, prior):
    with_padding = zm.Embedding(
        6, 3, padding_idx=2, posterior=POSTERIORS[posterior], prior=PRIORS[prior]
    )
    without = zm.Embedding(5, 3, posterior=POSTERIORS[posterior], prior=PRIORS[prior])
    with torch.no_grad():
        for ours, theirs in zip(with_padding.parameters(), without.parameters(), strict=True):
            theirs.copy_(ours if ours.dim() < 2 else ours[[0, 1, 3, 4, 5]])
    torch.testing.assert_close(with_padding.kl(), without.kl())


@pytest.mark.parametrize("posterior", ["ZeroMean", "Multiplicative-layer", "Additive"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_keep_their_noise_and_a_finite_kl(posterior, dtype):
    layer = zm.Linear(300, 200, posterior=POSTERIORS[posterior], prior=zm.Normal(), dtype=dtype)
    x = torch.randn(64, 300, dtype=dtype)
    wide = zm.Linear(300, 200, posterior=POSTERIORS[posterior], prior=zm.Normal())
    wide.load_state_dict(layer.state_dict())
    spread = torch.stack([layer(x).float() for _ in range(20)]).std(0).mean()
    expected = torch.stack([wide(x.float()) for _ in range(20)]).std(0).mean()
    torch.testing.assert_close(spread, expected, rtol=0.05, atol=0)
    assert layer.kl().isfinite()
    torch.testing.assert_close(layer.kl(), wide.kl(), rtol=0.02, atol=0)


def test_likelihood_refuses_outputs_without_an_output_dimension():
    with pytest.raises(ValueError, match=r"shape .*outputs\), got \(5,\); use outputs.un"):
        zm.GaussianLikelihood().nll(torch.zeros(5), torch.zeros(5))


def test_elbo_loss_refuses_an_unreduced_likelihood_and_a_missing_count():
    with pytest.raises(ValueError, match=r"must be one number.*\(5,\); use nll.mean\(\)"):
        zm.elbo_loss(torch.zeros(5), torch.zeros(()), num_data=10)
    with pytest.raises(ValueError, match=r"num_data must be .* training set"):
        zm.elbo_loss(torch.zeros(()), torch.zeros(()), num_data=math.nan)


@pytest.mark.parametrize("posterior", ["additive", zm.Additive((2, 2)), lambda *a, **k: None])
def test_posterior_must_be_a_class_or_a_partial(posterior):
    with pytest.raises(TypeError, match=r"class such as zm\.Additive, or functools\.partial"):
        zm.Linear(2, 2, posterior=posterior)


def test_prior_must_be_an_instance():
    with pytest.raises(TypeError, match=r"prior must have a method kl\(posterior\)"):
        zm.Linear(2, 2, prior=zm.LogUniform)


def test_clipping_leaves_alone_what_is_not_learned():
    noise = zm.GaussianDropout(4, p=0.9, learn=False)
    before = noise.log_alpha.clone()
    zm.clip_log_alpha_(nn.Sequential(noise), high=0.0)
    assert torch.equal(noise.log_alpha, before)
    assert before.item() > 0


def test_terms_that_are_no_single_numbers_are_refused():
    with pytest.raises(ValueError, match=r"kl must be one number, .* got a tensor of shape \(2,\)"):
        zm.elbo_loss(torch.tensor(1.0), torch.ones(2), num_data=10)
    with pytest.raises(ValueError, match=r"must have the shape .*3\), got \(5, 1\)"):
        zm.GaussianLikelihood(3).nll(torch.zeros(5, 1), torch.zeros(5, 1))
    with pytest.raises(ValueError, match="num_outputs must be at least 1, got 0"):
        zm.GaussianLikelihood(0)


def test_frozen_parameters_are_not_clipped():
    posterior = partial(zm.Multiplicative, share="layer", log_alpha=2.0)
    model = nn.Sequential(
        zm.Linear(3, 3, posterior=posterior), zm.Linear(3, 3, posterior=zm.Additive)
    ).requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zm.clip_log_alpha_(model, low=0.0, high=0.0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("log_alpha", [-60.0, -5.0, 5.0])
@pytest.mark.parametrize(
    "prior", [zm.StudentT(), zm.StudentT(kl="sample"), zm.LogUniform("sample"), zm.LogUniform()]
)
def test_weights_of_zero_have_finite_gradients(prior, log_alpha):
    posterior = partial(zm.Multiplicative, share="weight", log_alpha=log_alpha)
    layer = zm.Linear(3, 2, posterior=posterior, prior=prior)
    nn.init.zeros_(layer.weight.mean)
    layer.kl().backward()
    for parameter in layer.weight.parameters():
        assert parameter.grad is None or parameter.grad.abs().max() < 1e6
