"""Noise on units: against quadrature, against binary dropout, and as part of a model."""

import copy
import math
import pickle

import mpmath
import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.functional import log_normal

LOW, HIGH = -20.0, 0.0
# (location, log_scale): inside the interval, on its ends, outside it, narrow and wide.
PARAMETERS = [
    (0.0, -5.0),
    (0.0, -8.0),
    (-1e-3, -6.0),
    (-1.0, -1.0),
    (-3.0, -6.0),
    (-10.0, 0.0),
    (-10.0, 3.0),
    (-19.0, 2.0),
    (-20.0, -3.0),
    (-25.0, -1.0),
    (-40.0, 1.0),
    (5.0, -2.0),
    (5.0, -5.0),
    (3.0, 4.0),
]

NOISES = {
    "gaussian-layer": lambda n, **o: zm.GaussianDropout(n, 0.3, **o),
    "gaussian-unit": lambda n, **o: zm.GaussianDropout(n, 0.3, share="unit", **o),
    "gaussian-fixed": lambda n, **o: zm.GaussianDropout(n, 0.3, learn=False, **o),
    "lognormal": lambda n, **o: zm.LogNormalDropout(n, location=-0.5, log_scale=-1.0, **o),
}
every_noise = pytest.mark.parametrize("noise", NOISES)
INPUTS = {"dense": (4, 6), "sequence": (4, 6, 5), "image": (4, 6, 3, 2)}


@mpmath.workdps(40)
def expectation(f, location, log_scale):
    """∫ f(log θ, density) over the cut normal, by mpmath."""
    mu, sigma = mpmath.mpf(location), mpmath.exp(mpmath.mpf(log_scale))
    low, high = mpmath.mpf(LOW), mpmath.mpf(HIGH)
    peak = min(max(mu, low), high)

    def unnormalized(x):
        return mpmath.exp(-(((x - mu) / sigma) ** 2 - ((peak - mu) / sigma) ** 2) / 2)

    # Cut the interval where the density lives: in steps of its width, normal or exponential.
    width = sigma / (1 + abs(peak - mu) / sigma)
    steps = [peak + sign * width * k for sign in (-1, 1) for k in (1, 3, 8, 20, 60)]
    points = sorted({low, high, peak, *(x for x in steps if low < x < high)})
    mass = mpmath.quad(unnormalized, points)
    return mpmath.quad(lambda x: f(x, unnormalized(x) / mass) * unnormalized(x) / mass, points)


def reference_kl(location, log_scale):
    return expectation(lambda x, q: mpmath.log(q * (HIGH - LOW)), location, log_scale)


@pytest.mark.parametrize(("location", "log_scale"), PARAMETERS)
def test_lognormal_moments_and_kl_against_quadrature(location, log_scale):
    arguments = (torch.tensor(location), torch.tensor(log_scale), LOW, HIGH)
    first = expectation(lambda x, q: mpmath.exp(x), location, log_scale)
    variance = expectation(lambda x, q: (mpmath.exp(x) - first) ** 2, location, log_scale)
    log_snr = float(mpmath.log(first) - mpmath.log(variance) / 2)
    assert log_normal.kl(*arguments).item() == pytest.approx(
        float(reference_kl(location, log_scale)), rel=1e-7
    )
    assert log_normal.log_mean(*arguments).item() == pytest.approx(
        float(mpmath.log(first)), rel=1e-7, abs=1e-8
    )
    if log_snr < math.log(1e3):
        assert log_normal.log_snr(*arguments).item() == pytest.approx(log_snr, abs=1e-5)
    else:
        assert log_normal.log_snr(*arguments).item() > math.log(1e3)


@pytest.mark.parametrize(("location", "log_scale"), PARAMETERS)
def test_lognormal_kl_gradient_against_quadrature(location, log_scale):
    parameters = (
        torch.tensor(location, requires_grad=True),
        torch.tensor(log_scale, requires_grad=True),
    )
    gradients = torch.autograd.grad(log_normal.kl(*parameters, LOW, HIGH), parameters)
    step = 1e-6 * math.exp(min(log_scale, 0.0))
    for gradient, (left, right) in zip(
        gradients,
        [
            ((location - step, log_scale), (location + step, log_scale)),
            ((location, log_scale - step), (location, log_scale + step)),
        ],
        strict=True,
    ):
        expected = float((reference_kl(*right) - reference_kl(*left)) / (2 * step))
        assert gradient.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("location", "log_scale"), PARAMETERS)
@mpmath.workdps(40)
def test_lognormal_draws_follow_the_distribution(location, log_scale):
    probabilities = torch.linspace(0.02, 0.98, 13)
    draws = log_normal.sample(
        torch.tensor(location), torch.tensor(log_scale), LOW, HIGH, probabilities
    ).log()
    mu, sigma = mpmath.mpf(location), mpmath.exp(mpmath.mpf(log_scale))
    ends = [(mpmath.mpf(end) - mu) / sigma for end in (LOW, HIGH)]
    sign = -1 if ends[0] + ends[1] > 0 else 1  # On the left, ncdf keeps its digits.
    mass = [mpmath.ncdf(sign * end) for end in ends]
    for probability, draw in zip(probabilities.tolist(), draws.tolist(), strict=True):
        at = mpmath.ncdf(sign * (mpmath.mpf(draw) - mu) / sigma)
        # The map may run upwards or downwards: flipped ends are drawn from the other side.
        fraction = float((at - mass[0]) / (mass[1] - mass[0]))
        assert min(abs(fraction - probability), abs(1 - fraction - probability)) < 2e-3


@pytest.mark.parametrize(("location", "log_scale"), PARAMETERS)
def test_lognormal_draws_are_differentiable(location, log_scale):
    uniform = torch.tensor([0.1, 0.4, 0.9], dtype=torch.float64)
    # In units of the width of the distribution, so that one step suits all parameters.
    width = math.exp(log_scale)

    def log_draw(shift, stretch):
        location_ = torch.as_tensor(location, dtype=torch.float64) + width * shift
        log_scale_ = torch.as_tensor(log_scale, dtype=torch.float64) + stretch
        return log_normal.sample(location_, log_scale_, LOW, HIGH, uniform).log() / width

    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    shift = torch.full((), 1e-3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_draw, (shift, zero), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("location", [-1e4, -30.0, -20.0, -1.0, 0.0, 1.0, 1e4])
@pytest.mark.parametrize("log_scale", [-100.0, -20.0, -5.0, 0.0, 5.0, 20.0, 100.0])
def test_extreme_lognormal_parameters_stay_finite_in_float32(location, log_scale):
    noise = zm.LogNormalDropout(3, location=location, log_scale=log_scale)
    draws = noise.draw(50)
    assert ((draws > 0) & (draws <= 1)).all()
    assert ((noise.mean() > 0) & (noise.mean() <= 1)).all()
    assert noise.log_snr().isfinite().all()
    assert noise.kl() >= -1e-6
    (noise.kl() + draws.sum() + noise.mean().sum()).backward()
    assert noise.location.grad.isfinite().all()
    assert noise.log_scale.grad.isfinite().all()
    if log_scale <= -5:
        # However far out, the KL pulls back towards more noise.
        gradient = torch.autograd.grad(noise.kl(), noise.log_scale)[0]
        assert (gradient < -0.5 * noise.num_features / 3).all()


@every_noise
def test_draws_have_the_stated_mean_and_snr(noise):
    module = NOISES[noise](6)
    draws = module.draw(20_000)
    stderr = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - module.mean()).abs() < 4 * stderr).all()
    snr = draws.mean(0) / draws.std(0)
    torch.testing.assert_close(snr, module.log_snr().exp(), rtol=0.05, atol=0.0)


def test_gaussian_dropout_has_the_moments_of_binary_dropout():
    p = 0.3
    draws = zm.GaussianDropout(1, p).draw(50_000)
    binary = nn.functional.dropout(torch.ones(50_000, 1), p)
    torch.testing.assert_close(draws.mean(), binary.mean(), rtol=0.02, atol=0.0)
    torch.testing.assert_close(draws.var(), binary.var(), rtol=0.05, atol=0.0)


def test_gaussian_dropout_kl_is_that_of_one_multiplier_a_unit():
    for share in ("layer", "unit"):
        module = zm.GaussianDropout(7, 0.2, share=share, dtype=torch.float64)
        weights = zm.Multiplicative((7, 1), share="neuron", dtype=torch.float64)
        nn.init.constant_(weights.log_alpha, math.log(0.25))
        torch.testing.assert_close(module.kl(), zm.LogUniform().kl(weights))
        module.kl().backward()
        assert (module.log_alpha.grad < 0).all()


def test_fixed_gaussian_dropout_has_no_parameters_and_no_kl():
    module = zm.GaussianDropout(7, 0.2, learn=False)
    assert not list(module.parameters())
    assert module.kl() == 0
    assert zm.kl_by_layer(nn.Sequential(module)) == {}
    assert set(module.state_dict()) == {"keep", "log_alpha"}


@every_noise
@pytest.mark.parametrize("shape", INPUTS.values(), ids=INPUTS)
def test_noise_is_drawn_for_every_object_and_shared_by_positions(noise, shape):
    module = NOISES[noise](6)
    for training in (True, False):
        output = module.train(training)(torch.ones(shape)).reshape(4, 6, -1)
        assert (output == output[..., :1]).all()
        assert output[..., 0].unique().numel() == 24


@every_noise
def test_samplers_mean_and_weight(noise):
    module = NOISES[noise](6)
    x = torch.randn(4, 6, 5)
    with zm.sampling(module, zm.mean):
        torch.testing.assert_close(module(x), x * module.mean_scale()[:, None])
        with zm.sampling(module, zm.weight):
            ratio = module(x) / x
            torch.testing.assert_close(ratio, ratio[:1, :, :1].expand_as(ratio))
            assert not torch.equal(module(x), module(x))
        assert torch.equal(module(x), module(x))
    assert module.sampler is zm.local


def test_pruning_accumulates_and_survives_state_dict_and_training():
    module = zm.LogNormalDropout(5)
    with torch.no_grad():
        module.location.copy_(torch.tensor([0.0, -10.0, -10.0, -1.0, 0.0]))
        module.log_scale.copy_(torch.tensor([-5.0, 3.0, 0.5, -3.0, -5.0]))
    assert module.prune_(0.5) == 2
    assert module.keep.tolist() == [True, False, False, True, True]
    kept_kl = log_normal.kl(module.location, module.log_scale, LOW, HIGH)[module.keep].sum()
    torch.testing.assert_close(module.kl(), kept_kl.float())
    assert module.mean_scale()[1:3].tolist() == [0.0, 0.0]
    assert "3 left" in repr(module)

    with torch.no_grad():
        module.log_scale[2] = -5.0  # Good again, but gone.
        module.log_scale[3] = 3.0
    assert module.prune_() == 1
    assert module.prune_() == 0
    assert module.keep.tolist() == [True, False, False, False, True]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (module(torch.randn(8, 5)).square().sum() + module.kl()).backward()
    assert module.location.grad[1:4].tolist() == [0.0, 0.0, 0.0]
    optimizer.step()

    fresh = zm.LogNormalDropout(5)
    fresh.load_state_dict(module.state_dict())
    for twin in (fresh, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin.keep, module.keep)
        assert twin(torch.randn(8, 5))[:, 1:4].abs().sum() == 0


def test_gaussian_noise_refuses_to_be_pruned():
    for share in ("layer", "unit"):
        with pytest.raises(ValueError, match=r"may still carry everything in its variance; use"):
            zm.GaussianDropout(3, share=share).prune_()


def test_a_useless_unit_loses_its_signal_in_training():
    x = torch.randn(256, 2)
    target = 3 * x[:, :1]
    noise = zm.LogNormalDropout(2, log_scale=-2.0)
    model = nn.Sequential(noise, nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=0.03, log_alpha_lr=0.1))
    for _ in range(500):
        optimizer.zero_grad()
        nll = 10 * (model(x) - target).square().mean()
        zm.elbo_loss(nll, zm.kl_divergence(model), num_data=256).backward()
        optimizer.step()
    assert noise.prune_() == 1
    assert noise.keep.tolist() == [True, False]


def test_kl_weight_is_a_factor_of_the_kl_and_of_nothing_else():
    plain, dear = zm.LogNormalDropout(4), zm.LogNormalDropout(4, kl_weight=7.0)
    for noise in (plain, dear):
        with torch.no_grad():
            noise.log_scale.copy_(torch.tensor([-5.0, -1.0, 0.0, 1.0]))
        noise.prune_()
    torch.testing.assert_close(zm.kl_divergence(dear), 7 * zm.kl_divergence(plain))
    assert torch.equal(dear.keep, plain.keep)
    assert "kl_weight=7" in repr(dear)
    assert "kl_weight" not in repr(plain)
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="kl_weight must be at least 0 and finite"):
            zm.LogNormalDropout(4, kl_weight=wrong)


def test_kl_clipping_and_parameter_groups_see_noise_on_units():
    model = nn.Sequential(
        zm.Linear(4, 6, posterior=zm.Additive),
        zm.LogNormalDropout(6),
        nn.ReLU(),
        zm.Linear(6, 3),
        zm.GaussianDropout(3, 0.9),
    )
    terms = zm.kl_by_layer(model)
    assert terms.keys() == {"0", "1", "3", "4"}
    torch.testing.assert_close(zm.kl_divergence(model), sum(terms.values()))
    torch.testing.assert_close(terms["1"], model[1].kl())
    zm.clip_log_alpha_(model, high=0.0)
    assert model[4].log_alpha == 0
    groups = {g["name"]: g["params"] for g in zm.parameter_groups(model, lr=1e-3)}
    logarithms = {id(p) for p in groups["log_alpha"]}
    assert {id(model[1].log_scale), id(model[4].log_alpha)} < logarithms
    assert id(model[1].location) in {id(p) for p in groups["undecayed"]}


@every_noise
def test_monte_carlo_prediction_draws_every_sample_anew(noise):
    model = nn.Sequential(nn.Linear(4, 6), NOISES[noise](6), nn.Linear(6, 2))
    x = torch.randn(3, 4)
    outputs = zm.sample_outputs(model, x, 6, seed=0)
    assert outputs.reshape(6, -1).unique(dim=0).shape[0] == 6
    assert torch.equal(outputs, zm.sample_outputs(model, x, 6, seed=0))
    chunked = zm.sample_outputs(model, x, 4000, seed=1, chunk_size=500)
    looped = torch.stack([model(x).detach() for _ in range(4000)])
    stderr = (chunked.var(0) / 2000).sqrt()
    assert ((chunked.mean(0) - looped.mean(0)).abs() < 5 * stderr).all()
    torch.testing.assert_close(chunked.std(0), looped.std(0), rtol=0.1, atol=0.0)
    means = zm.sample_outputs(model, x, 2, sampler=zm.mean)
    assert torch.equal(means[0], means[1])


@every_noise
def test_compiles_without_graph_breaks(noise, fresh_dynamo):
    module = NOISES[noise](6)
    x = torch.randn(4, 6, 3)

    def loss():
        return module(x).square().sum() + zm.kl_divergence(module)

    torch.manual_seed(1)
    expected = loss()
    torch.manual_seed(1)
    value = torch.compile(loss, fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(value, expected)
    if value.requires_grad:
        value.backward()


@every_noise
def test_meta_device_dtype_and_autocast(noise):
    module = NOISES[noise](6, device="meta", dtype=torch.float64)
    assert {t.device.type for t in module.state_dict().values()} == {"meta"}
    assert module.log_snr().dtype == module.mean_scale().dtype == torch.float64
    assert module(torch.randn(4, 6, device="meta")).shape == (4, 6)
    assert "6" in repr(module)
    model = nn.Sequential(nn.Linear(4, 6), NOISES[noise](6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(3, 4))
    assert output.dtype == torch.bfloat16
    assert NOISES[noise](6).half().kl().dtype in (torch.float32, torch.float16)


@every_noise
def test_trains_in_half_the_precision_and_double(noise):
    for dtype in (torch.bfloat16, torch.float64):
        module = NOISES[noise](6, dtype=dtype)
        output = module(torch.randn(4, 6, dtype=dtype))
        assert output.dtype == dtype
        if list(module.parameters()):
            (output.sum() + module.kl()).backward()
            assert all(p.grad.isfinite().all() for p in module.parameters())


@every_noise
def test_wrong_inputs_are_refused(noise):
    for shape in [(6,), (4, 5), (4, 5, 6)]:
        with pytest.raises(ValueError, match=r"needs an input of shape \(N, 6\) or \(N, 6, \*\)"):
            NOISES[noise](6)(torch.randn(shape))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: zm.GaussianDropout(0), "num_features must be at least 1"),
        (lambda: zm.GaussianDropout(3, 1.0), "p must lie between 0 and 1, got 1.0"),
        (lambda: zm.GaussianDropout(3, share="weight"), "share must be one of layer, unit"),
        (lambda: zm.LogNormalDropout(3, low=1.0), "low must be less than high"),
        (lambda: zm.LogNormalDropout(3, log_scale=math.nan), "must be finite"),
        (lambda: zm.LogNormalDropout(3).prune_(0.0), "threshold must be a positive number"),
    ],
)
def test_wrong_settings_are_refused(build, match):
    with pytest.raises(ValueError, match=match):
        build()


def test_lognormal_noise_means_the_same_on_both_sides_of_the_interval():
    location = torch.linspace(-21, 1, 200, dtype=torch.float64)
    for uniform in (0.05, 0.5, 0.9):
        noise = torch.full_like(location, uniform)
        theta = log_normal.sample(location, torch.full_like(location, 1.5), -20.0, 0.0, noise)
        assert (theta.diff() >= 0).all()
        more = log_normal.sample(location, torch.full_like(location, 1.5), -20.0, 0.0, noise + 0.05)
        assert (more >= theta).all()


@pytest.mark.parametrize("noise", [zm.GaussianDropout(3), zm.LogNormalDropout(3)])
def test_reset_keeps_all_units(noise):
    noise.keep[1] = False
    noise.reset_parameters()
    assert noise.keep.all()
