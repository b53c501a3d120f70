"""Binary dropout whose rate is learned: against enumeration, quadrature and torch's own."""

import itertools
import math

import mpmath
import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.functional import binary_dropout_kl


@pytest.mark.parametrize("learn", [None, "reinforce"])
@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_multipliers_are_those_of_torch(p, learn):
    torch.manual_seed(0)
    module = zm.BinaryDropout(4, p, learn=learn)
    drawn = module(torch.ones(20_000, 4)).detach()
    values = drawn.unique()
    torch.testing.assert_close(values, nn.Dropout(p)(torch.ones(1000)).unique())
    error = (p / (1 - p) / len(drawn)) ** 0.5
    assert ((drawn.mean(0) - 1).abs() < 5 * error).all()
    torch.testing.assert_close(
        module.log_snr().detach().exp(), torch.full((4,), ((1 - p) / p) ** 0.5)
    )


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_relaxed_multipliers_round_to_the_binary_ones(p):
    torch.manual_seed(0)
    module = zm.BinaryDropout(3, p, learn="concrete", temperature=0.05)
    drawn = (1 - p) * module(torch.ones(20_000, 3)).detach()
    kept = (drawn > 0.5).double()
    assert ((kept.mean(0) - (1 - p)).abs() < 5 * (p * (1 - p) / len(drawn)) ** 0.5).all()
    # P(δ < z < 1 − δ) goes to zero with the temperature.
    assert ((drawn > 0.02) & (drawn < 0.98)).double().mean() < 0.1


@pytest.mark.parametrize("share", ["layer", "unit"])
def test_kl_is_that_of_bernoullis(share):
    module = zm.BinaryDropout(5, 0.3, share=share, learn="reinforce", prior_p=0.1)
    q = torch.distributions.Bernoulli(torch.full((5,), 0.3))
    prior = torch.distributions.Bernoulli(torch.full((5,), 0.1))
    expected = torch.distributions.kl_divergence(q, prior).sum()
    torch.testing.assert_close(zm.kl_divergence(module).detach(), expected)
    assert zm.kl_divergence(zm.BinaryDropout(5, 0.3)) == 0


def enumerated(module, linear, x, y):
    """E loss over all masks, and its gradient in log α."""
    rate = module.rate
    expected = torch.zeros((), dtype=x.dtype)
    for mask in itertools.product((0.0, 1.0), repeat=module.num_features):
        kept = torch.tensor(mask, dtype=x.dtype)
        probability = torch.where(kept > 0, 1 - rate, rate).prod()
        losses = (linear(x * kept / (1 - rate)).squeeze(1) - y).square()
        expected = expected + probability * losses.mean()
    return torch.autograd.grad(expected, module.log_alpha)[0]


@pytest.mark.parametrize("share", ["layer", "unit"])
def test_reinforce_is_unbiased_and_less_noisy_with_its_baseline(share):
    torch.manual_seed(0)
    module = zm.BinaryDropout(3, 0.3, share=share, learn="reinforce", dtype=torch.float64)
    linear = nn.Linear(3, 1, dtype=torch.float64)
    model = nn.Sequential(module, linear)
    x, y = torch.randn(8, 3, dtype=torch.float64), 3 + torch.randn(8, dtype=torch.float64)
    expected = enumerated(module, linear, x, y)
    variances = {}
    for baseline in (True, False):
        gradients = []
        for _ in range(500):
            noise = zm.draw_noise(model, len(x))
            with zm.held_noise(model, noise, num_objects=len(x)):
                losses = (model(x).squeeze(1) - y).square()
            term = zm.reinforce_term(model, noise, losses, baseline=baseline)
            assert term == 0
            gradients.append(torch.autograd.grad(losses.mean() + term, module.log_alpha)[0])
        gradients = torch.stack(gradients)
        error = gradients.std(0) / len(gradients) ** 0.5
        assert ((gradients.mean(0) - expected).abs() < 5 * error).all()
        variances[baseline] = gradients.var(0).sum()
    assert variances[True] < 0.5 * variances[False]


def test_relaxed_gradients_are_near_and_less_noisy():
    torch.manual_seed(0)
    options = {"dtype": torch.float64}
    module = zm.BinaryDropout(3, 0.3, learn="concrete", temperature=0.1, **options)
    linear = nn.Linear(3, 1, **options)
    x, y = torch.randn(8, 3, **options), 3 + torch.randn(8, **options)
    expected = enumerated(module, linear, x, y)
    many = 4000
    losses = (linear(module(x.repeat(many, 1))).view(many, 8) - y).square().mean()
    found = torch.autograd.grad(losses, module.log_alpha)[0]
    assert found == pytest.approx(float(expected), rel=0.25)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("mean", [0.0, 0.5, 2.0])
def test_kl_of_dropped_weights_against_quadrature(p, mean):
    """The lecture's L2 penalty, less an entropy that it leaves out; and where that fails."""
    spread, scale = 0.02, 0.8
    kept = mean / (1 - p)

    def density(x, centre, width):
        return mpmath.npdf(x, centre, width)

    def q(x):
        return p * density(x, 0, spread) + (1 - p) * density(x, kept, spread)

    def integrand(x):
        return q(x) * mpmath.log(q(x) / density(x, 0, scale)) if q(x) > 0 else 0

    steps = [-12, -4, -1, 0, 1, 4, 12]
    points = sorted({c + s * spread for c in (0, kept) for s in steps})
    exact = float(mpmath.quad(integrand, points))
    constant = math.log(scale / spread) + spread**2 / (2 * scale**2) - 0.5
    approximate = float(binary_dropout_kl(torch.tensor(mean**2).double(), p, scale)) + constant
    if mean:
        assert approximate == pytest.approx(exact, abs=1e-6)
    else:  # The two peaks are one: there is nothing to know of which of them it is.
        entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
        assert exact - approximate == pytest.approx(entropy, abs=1e-6)


def test_without_the_entropy_the_least_penalty_is_at_no_dropout():
    p = torch.linspace(0.001, 0.9, 400)
    squares = torch.tensor(0.3)
    kl = binary_dropout_kl(squares, p, 1.0)
    entropy = torch.distributions.Bernoulli(p).entropy()
    assert 0 < int(kl.argmin()) < 399
    assert int((kl + entropy).argmin()) == 0


def test_projection_keeps_the_rate_below_a_half():
    module = zm.BinaryDropout(3, 0.9, learn="concrete", share="unit")
    zm.clip_log_alpha_(module, high=0.0)
    torch.testing.assert_close(module.rate.detach(), torch.full((3,), 0.5))
    fixed = zm.BinaryDropout(3, 0.9)
    zm.clip_log_alpha_(fixed, high=0.0)
    assert fixed.rate == pytest.approx(0.9)


def test_it_predicts_is_saved_and_expects_ones(tmp_path):
    torch.manual_seed(0)

    def build():
        drop = zm.BinaryDropout(8, 0.4, learn="concrete")
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), drop, nn.Linear(8, 3))

    model, x = build(), torch.randn(5, 4)
    with torch.no_grad():
        model[2].log_alpha.fill_(1.2)
    with zm.sampling(model, zm.mean):
        assert torch.equal(model(x), model[3](model[:2](x)))
    zm.save(model, tmp_path / "m.safetensors")
    loaded = zm.load(tmp_path / "m.safetensors", build())
    expected = zm.predict_proba(model, x, 20, seed=0)
    assert torch.equal(zm.predict_proba(loaded, x, 20, seed=0), expected)
    assert zm.sample_outputs(model, x, 5).std(0).min() > 0
    images = zm.BinaryDropout(2, 0.5)(torch.ones(6, 2, 3, 3))
    assert torch.equal(images, images[:, :, :1, :1].expand_as(images))  # Whole channels.


def test_no_dropout_is_no_dropout():
    x = torch.randn(3, 4)
    assert torch.equal(zm.BinaryDropout(4, 0.0)(x), x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 1.0}, r"p must lie in \[0, 1\), got 1.0"),
        ({"p": -0.1}, r"p must lie in \[0, 1\), got -0.1"),
        ({"p": 0.0, "learn": "concrete"}, "above 0 to be learned, got 0.0"),
        ({"prior_p": 1.0}, "prior_p must lie between 0 and 1"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
        ({"learn": "gumbel"}, "learn must be one of concrete, reinforce, got 'gumbel'"),
        ({"share": "weight"}, "share must be one of layer, unit"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zm.BinaryDropout(3, **options)
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\)"):
        binary_dropout_kl(torch.ones(()), 1.0, 1.0)


def test_what_reinforce_needs_is_named():
    model = nn.Sequential(zm.BinaryDropout(3, learn="reinforce"), nn.Linear(3, 1))
    noise = zm.draw_noise(model, 4)
    with pytest.raises(ValueError, match="no drop rate to learn"):
        zm.reinforce_term(nn.Linear(2, 2), noise, torch.ones(4))
    with pytest.raises(ValueError, match=r"nothing for 0\.units"):
        zm.reinforce_term(model, {}, torch.ones(4))
    with pytest.raises(ValueError, match="use reduction='none'"):
        zm.reinforce_term(model, noise, torch.ones(()))
    with pytest.raises(ValueError, match="noise for 4 examples and a loss of 5"):
        zm.reinforce_term(model, noise, torch.ones(5))
