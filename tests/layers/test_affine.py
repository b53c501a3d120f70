"""Random biases, and norms with random scales and shifts, through everything."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm

NOISY = partial(zm.Additive, log_variance=-2.0)
LAYERS = {
    "Linear": (lambda **o: zm.Linear(3, 2, **o), (4, 3)),
    "Conv2d": (lambda **o: zm.Conv2d(3, 2, 2, **o), (4, 3, 3, 2)),
    "ConvTranspose2d": (lambda **o: zm.ConvTranspose2d(3, 2, 2, **o), (4, 3, 2, 2)),
}
NORMS = {
    "BatchNorm1d": (nn.BatchNorm1d(3), (4, 3)),
    "BatchNorm2d": (nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "BatchNorm3d": (nn.BatchNorm3d(3), (4, 3, 2, 1, 2)),
    "GroupNorm": (nn.GroupNorm(2, 4), (4, 4, 3)),
    "LayerNorm": (nn.LayerNorm((2, 3)), (4, 2, 3)),
    "LayerNorm-no-bias": (nn.LayerNorm(3, bias=False), (4, 2, 3)),
}
every_layer = pytest.mark.parametrize("layer", LAYERS)
every_norm = pytest.mark.parametrize("norm", NORMS)
SAMPLERS = [zm.local, zm.weight, zm.moment_matched, zm.flipout, zm.auto, zm.mean]
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.__name__)


class Network(nn.Sequential):
    def __init__(self):
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6)
        super().__init__(*layers, nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))


def trained_norm(norm, **options):
    """A stochastic norm, made from one that has seen data, and that one."""
    torch.manual_seed(0)
    plain, shape = NORMS[norm]
    plain = copy.deepcopy(plain)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    for _ in range(3):
        plain(1 + 2 * torch.randn(shape))
    model = nn.Sequential(copy.deepcopy(plain)).eval()
    zm.make_stochastic_(model, norms=options.pop("norms", NOISY), **options)
    return model, plain.eval(), torch.randn(shape)


@every_layer
@every_sampler
def test_the_variance_of_a_bias_adds(layer, sampler):
    build, shape = LAYERS[layer]
    torch.manual_seed(0)
    model = nn.Sequential(build(bias=NOISY, posterior=NOISY, sampler=sampler))
    x = torch.randn(shape)
    with torch.no_grad():
        weight, bias = model[0].weight.moments(), model[0].bias.moments()
        plain = copy.deepcopy(model[0].plain_twin()).to_empty(device="cpu")
        for parameter, value in ((plain.weight, weight[0]), (plain.bias, bias[0])):
            parameter.copy_(value)
        mean = plain(x)
        plain.weight.copy_(weight[1])
        plain.bias.copy_(bias[1])
        variance = plain(x.square())
        count = 3000
        drawn = torch.stack([model(x) for _ in range(count)])
    if sampler is zm.mean:
        torch.testing.assert_close(drawn[0], mean)
        return
    assert ((drawn.mean(0) - mean).abs() < 5 * (variance / count).sqrt()).all()
    ratio = drawn.var(0) / variance
    assert ((ratio - 1).abs() < 6 * (2.2 / count) ** 0.5).all()


def test_a_bias_is_drawn_once_for_a_batch_with_weights_and_by_output_else():
    x = torch.zeros(5, 3)  # The bias alone is left.
    once = zm.Linear(3, 2, bias=NOISY, sampler=zm.weight)(x)
    assert (once == once[0]).all()
    assert len(zm.Linear(3, 2, bias=NOISY, sampler=zm.local)(x)[:, 0].unique()) == 5


@every_layer
def test_kl_counts_the_bias_once(layer):
    build, _ = LAYERS[layer]
    made = build(bias=NOISY, posterior=NOISY, prior=zm.Normal(0.5))
    expected = sum(
        torch.distributions.kl_divergence(
            torch.distributions.Normal(p.mean, (0.5 * p.log_variance).exp()),
            torch.distributions.Normal(0.0, 0.5),
        ).sum()
        for p in (made.weight, made.bias)
    )
    torch.testing.assert_close(zm.kl_divergence(nn.ModuleList([made, made])), expected)
    assert zm.kl_divergence(build(bias=NOISY, prior=None)) == 0


def test_keys_are_those_of_a_plain_bias_unless_it_is_random():
    assert set(zm.Linear(3, 2).state_dict()) == {"weight.scale", "bias"}
    random = zm.Linear(3, 2, bias=zm.Additive)
    assert set(random.state_dict()) == {"weight.scale", "bias.mean", "bias.log_variance"}
    assert (random.bias.mean.abs() <= 3**-0.5).all()
    assert random.bias.mean.abs().sum() > 0
    random.reset_parameters()
    assert (random.bias.mean.abs() <= 3**-0.5).all()
    norm = zm.BatchNorm1d(3)
    assert {key.partition(".")[0] for key in norm.state_dict()} == {"weight", "bias", "normalize"}
    assert norm.weight.mean.eq(1).all()
    assert norm.bias.mean.eq(0).all()


@every_norm
def test_a_norm_keeps_predictions_and_goes_back(norm):
    model, plain, x = trained_norm(norm)
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(model(x), plain(x))
    back = zm.to_deterministic(model)
    assert type(back[0]) is type(plain)
    torch.testing.assert_close(back(x), plain(x))
    assert back.state_dict().keys() == nn.Sequential(plain).state_dict().keys()
    # In train mode it follows the batch and keeps statistics as torch's does.
    model.train(), plain.train()
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(model(x), plain(x))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model[0].normalize.get_buffer(name), buffer)


@every_norm
@pytest.mark.parametrize("sampler", [zm.local, zm.weight, zm.flipout, zm.auto])
def test_moments_of_norms_are_those_of_samples(norm, sampler):
    model, _, x = trained_norm(norm, sampler=sampler)
    exact = zm.propagate_moments(model, x)
    count = 2000
    drawn = zm.sample_outputs(model, x, count, seed=0)
    assert ((drawn.mean(0) - exact.mean).abs() < 5 * (exact.variance / count).sqrt() + 1e-6).all()
    ratio = drawn.var(0) / exact.variance
    assert ((ratio - 1).abs() < 6 * (2.2 / count) ** 0.5).all()


def test_moments_of_random_biases_are_those_of_samples():
    torch.manual_seed(0)
    layers = zm.Linear(3, 4, bias=NOISY, posterior=NOISY), nn.ReLU(), zm.Linear(4, 2, bias=NOISY)
    for model in (nn.Sequential(layers[0]), nn.Sequential(*layers)):
        x = torch.randn(3, 3)
        exact = zm.propagate_moments(model, x)
        drawn = zm.sample_outputs(model, x, 8000, seed=0)
        error = drawn.std(0) / 8000**0.5
        assert ((drawn.mean(0) - exact.mean).abs() < 5 * error).all()
        assert ((drawn.var(0) / exact.variance - 1).abs() < 0.15).all()


def test_conversion_of_everything_keeps_predictions_and_says_so(tmp_path):
    torch.manual_seed(0)
    plain, x = Network().eval(), torch.randn(5, 1, 4, 4)
    model = copy.deepcopy(plain)
    report = zm.make_stochastic_(model, biases=True, norms=True)
    assert report.converted == ["0", "1", "4", "5", "7"]
    assert not report.left
    assert report.keeps_predictions
    random = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert random == {f"{i}.{part}" for i in (0, 1, 4, 5, 7) for part in ("weight", "bias")}
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(model(x), plain(x))
    assert (model(x) - plain(x)).abs().max() < 0.5
    assert zm.kl_divergence(model) > 0
    zm.elbo_loss(model(x).square().mean(), zm.kl_divergence(model), num_data=5).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    probabilities = zm.predict_proba(model, x, 8, seed=0)
    zm.save(model, tmp_path / "m.safetensors")
    for same in (
        zm.load(tmp_path / "m.safetensors", Network()),
        zm.load(tmp_path / "m.safetensors", model),
        copy.deepcopy(model),
    ):
        assert zm.predict_proba(same.eval(), x, 8, seed=0).equal(probabilities)
    by_moments = zm.predict_proba(model, x, method="moments")
    many = zm.predict_proba(model, x, 500, seed=0)
    torch.testing.assert_close(by_moments, many, atol=0.02, rtol=0)
    for sampler in (zm.weight, zm.flipout, zm.auto, zm.local):
        assert zm.predict_proba(model, x, 8, sampler=sampler).isfinite().all()
    assert "5.bias" in str(zm.summary(model))


def test_defaults_leave_biases_and_norms_as_they_are():
    model = Network()
    report = zm.make_stochastic_(model)
    assert report.left == {
        "1": "BatchNorm2d is converted with norms=True",
        "5": "LayerNorm is converted with norms=True",
    }
    assert isinstance(model[4].bias, nn.Parameter)
    bare = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    report = zm.make_stochastic_(bare, norms=True)
    assert report.left == {"1": "it has no affine parameters"}


def test_posteriors_of_biases_and_norms_can_be_chosen():
    model = Network()
    zm.make_stochastic_(
        model, posterior=zm.ZeroMean, biases=zm.ZeroMean, norms=partial(zm.Multiplicative)
    )
    assert isinstance(model[0].bias, zm.ZeroMean)
    assert isinstance(model[1].bias, zm.Multiplicative)
    assert zm.sample_outputs(model.eval(), torch.randn(2, 1, 4, 4), 3).isfinite().all()


def test_held_noise_holds_biases_and_norms():
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(1, 1, 4, 4).expand(5, 1, 4, 4)
    zm.make_stochastic_(model, posterior=NOISY, biases=NOISY, norms=NOISY)
    with zm.held_noise(model):
        assert model(x).equal(model(x))
        assert model(x).std(0).max() < 1e-5
    noise = zm.draw_noise(model, 5)
    with zm.held_noise(model, noise, num_objects=5):
        by_example = model(x)
    assert (by_example.std(0) > 0).all()

    def one(noise):
        with zm.held_noise(model, noise):
            return model(x[:1])[0]

    torch.testing.assert_close(torch.func.vmap(one)(noise), by_example)


@pytest.mark.parametrize("sampler", [zm.local, zm.weight, zm.flipout])
def test_it_compiles_without_graph_breaks(sampler, fresh_dynamo):
    model, x = Network().eval(), torch.randn(2, 1, 4, 4)
    zm.make_stochastic_(model, posterior=NOISY, biases=NOISY, norms=NOISY, sampler=sampler)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(x), expected)


def test_yesterdays_biases_are_todays_prior(tmp_path):
    model = Network()
    zm.make_stochastic_(model, biases=NOISY, norms=NOISY)
    zm.become_prior_(model)
    torch.testing.assert_close(zm.kl_divergence(model), torch.zeros(()), atol=1e-4, rtol=0)
    model[4].bias.mean.data += 0.1
    expected = (0.01 / model[4].bias.log_variance.exp() / 2).sum()
    torch.testing.assert_close(zm.kl_divergence(model), expected, rtol=1e-3, atol=0)
    zm.save(model, tmp_path / "m.safetensors")
    loaded = zm.load(tmp_path / "m.safetensors", Network())
    torch.testing.assert_close(zm.kl_divergence(loaded), zm.kl_divergence(model))


def test_pruning_and_compression_leave_them_alone():
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(5, 1, 4, 4)
    zm.make_stochastic_(model, biases=NOISY, norms=NOISY)
    before = zm.sparsity(model).total.weights
    assert before == 36 + 96 + 18
    report = zm.prune_(model, sparsity=0.5)
    assert list(report.pruned) == ["0", "4", "7"]
    assert not [name for name, _ in model.named_buffers() if "bias" in name]
    compressed = zm.compress(model, example_inputs=x)
    torch.testing.assert_close(compressed(x), zm.to_deterministic(model)(x))
    assert "bias" not in str(zm.quantize_(model, inputs=x))
    variance = nn.Sequential(
        zm.Linear(3, 8, bias=NOISY), nn.ReLU(), zm.Linear(8, 2, bias=zm.ZeroMean)
    )
    zm.prune_(variance, by="variance", sparsity=0.5)
    small = zm.compress(variance)
    assert small(torch.randn(4, 3)).shape == (4, 2)


def test_zero_mean_takes_weights_alone():
    model = nn.Sequential(zm.Linear(3, 3, posterior=NOISY, bias=NOISY))
    plain = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    zm.make_stochastic_(plain, posterior=NOISY, norms=NOISY)
    for each in (model, plain):
        zm.zero_mean_(each, where=lambda *_: True, inputs=torch.randn(4, 3))
    assert model[0].bias.has_mean
    assert plain[1].weight.has_mean
    assert not plain[0].weight.has_mean


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="A bias has independent numbers, got FullCovariance"):
        zm.Linear(3, 2, bias=zm.FullCovariance)
    noise = partial(zm.Additive, noise=zm.rademacher)
    with pytest.raises(ValueError, match=r"needs normal noise, got rademacher; use prior=None"):
        zm.Linear(3, 2, bias=noise)
    with pytest.raises(ValueError, match=r"zm.local needs normal noise, got rademacher"):
        zm.Linear(3, 2, bias=noise, prior=None)
    with pytest.raises(TypeError, match="bias must be True or False, or the posterior"):
        zm.Conv2d(3, 2, 1, bias="no")
    for name in ("biases", "norms"):
        with pytest.raises(TypeError, match=f"{name} must be True, False or a posterior"):
            zm.make_stochastic_(Network(), **{name: "yes"})
