import math
import sys
from pathlib import Path

import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from torch.distributions import Normal, kl_divergence

from zeromean import functional as zf
from zeromean.functional import student_t_integrals
from zeromean.functional.kl import normal_kl_sum

FLOATS = [torch.float32, torch.float64]
NUM_DRAWS = 200_000
# torch's own: dynamo instantiates autograd functions, torch.func still scripts decompositions.
ignore_torch_deprecations = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def exact_kl(inverse_alpha: float) -> float:
    t = mpmath.mpf(inverse_alpha) / 2
    if t > 1e4:
        return float((mpmath.log(4 * t) + mpmath.euler) / 2 - 1 / (4 * t) - 3 / (16 * t * t))
    return float(t * mpmath.hyp2f2(1, 1, 1.5, 2, -t))


def student_t_by_quadrature(mean: float, std: float, df: float) -> float:
    """Integrate the Gaussian density times log(df + w²) piecewise in log|w| on each side of 0."""
    nodes, node_weights = np.polynomial.legendre.leggauss(20)
    total = 0.0
    for sign in (-1, 1):
        centre = sign * mean / std
        if centre < -40:
            continue
        # In units of std; the corner of the logarithm lies at √df / std, the peak at `centre`.
        edges = np.concatenate(
            [
                np.exp(np.linspace(-60, 2.5, 400)),
                np.linspace(max(centre - 12, 1e-26), max(centre, 0) + 12, 200),
            ]
        )
        edges = np.unique(np.append(edges, 0.0))
        edges = edges[(edges <= max(centre, 0) + 12)]
        left, right = edges[:-1, None], edges[1:, None]
        points = (left + right) / 2 + (right - left) / 2 * nodes
        density = np.exp(-0.5 * (points - centre) ** 2) / math.sqrt(2 * math.pi)
        logarithm = np.log(df / std**2 + points**2) + 2 * math.log(std)
        total += float(np.sum(density * logarithm * node_weights * (right - left) / 2))
    constant = (np.euler_gamma + math.log(2)) / 2
    return -math.log(std) + (df + 1) / 2 * total + constant


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("variance", [0.0, -0.0, -1e-9, 1e-310])
def test_safe_sqrt_is_flat_zero_where_there_is_no_variance(variance, dtype):
    value = torch.tensor([variance, 4.0], dtype=dtype, requires_grad=True)
    root = zf.safe_sqrt(value)
    root.sum().backward()
    assert root.tolist() == [0.0, 2.0]
    assert value.grad.tolist() == [0.0, 0.25]


def test_safe_sqrt_derivatives():
    variance = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(zf.safe_sqrt, variance)
    assert torch.autograd.gradgradcheck(zf.safe_sqrt, variance)


def test_log_mean_exp_survives_large_values():
    values = torch.tensor([[1000.0, 1000.0], [0.0, math.log(3)]], dtype=torch.float64)
    expected = torch.tensor([1000.0, math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(zf.log_mean_exp(values, dim=1), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_dawson_matches_scipy(dtype, tolerance):
    z = torch.logspace(-30, 18, 400, dtype=dtype)
    z = torch.cat([-z, torch.zeros(1, dtype=dtype), z]).requires_grad_()
    value = zf.dawson(z)
    (slope,) = torch.autograd.grad(value.sum(), z)
    points = z.detach().double().numpy()
    expected = scipy.special.dawsn(points)
    np.testing.assert_allclose(value.detach().double().numpy(), expected, rtol=tolerance)
    moderate = np.abs(points) < 1e3
    np.testing.assert_allclose(
        slope.double().numpy()[moderate],
        (1 - 2 * points * expected)[moderate],
        atol=20 * tolerance,
    )


def test_dawson_is_finite_where_the_square_overflows():
    z = torch.tensor([1e30, -3e38, math.inf], requires_grad=True)
    value = zf.dawson(z)
    value.sum().backward()
    torch.testing.assert_close(value[:1], torch.tensor([5e-31]))
    assert value[2] == 0
    assert z.grad.isfinite().all()


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (1e-4, 5.2403016),
        (0.01, 2.9326889),
        (0.1, 1.7241378),
        (1, 0.4266856),
        (10, 0.0491777),
        (100, 0.0049917),
    ],
)
def test_log_uniform_kl_has_the_published_values(alpha, expected):
    value = zf.log_uniform_kl(torch.tensor(1 / alpha, dtype=torch.float64))
    assert value.item() == pytest.approx(expected, abs=6e-8)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_log_uniform_kl_and_its_gradient_are_exact(dtype, tolerance):
    log_alpha = torch.linspace(-20, 20, 161, dtype=torch.float64)
    inverse_alpha = torch.exp(-log_alpha).to(dtype).requires_grad_()
    value = zf.log_uniform_kl(inverse_alpha)
    (slope,) = torch.autograd.grad(value.sum(), inverse_alpha)
    points = inverse_alpha.detach().double().numpy()
    expected = [exact_kl(point) for point in points]
    np.testing.assert_allclose(value.detach().numpy(), expected, rtol=tolerance)
    # dKL / dlog(alpha) = -z D(z)
    z = np.sqrt(points / 2)
    by_log_alpha = -points * slope.double().numpy()
    np.testing.assert_allclose(by_log_alpha, -z * scipy.special.dawsn(z), rtol=tolerance)


def test_log_uniform_kl_integrates_dawson():
    for inverse_alpha in (0.3, 7.0, 60.0):
        integral, _ = scipy.integrate.quad(
            scipy.special.dawsn, 0, math.sqrt(inverse_alpha / 2), epsabs=1e-13
        )
        value = zf.log_uniform_kl(torch.tensor(inverse_alpha, dtype=torch.float64))
        assert value.item() == pytest.approx(2 * integral, rel=1e-12)


def test_log_uniform_kl_at_its_ends():
    ends = torch.tensor([0.0, torch.finfo(torch.float32).max], requires_grad=True)
    value = zf.log_uniform_kl(ends)
    value.sum().backward()
    assert value[0] == 0
    assert ends.grad[0] == pytest.approx(0.5, rel=1e-6)
    assert value.isfinite().all()
    assert ends.grad.isfinite().all()


def test_log_uniform_kl_accepts_half_precision():
    value = zf.log_uniform_kl(torch.ones(3, dtype=torch.bfloat16))
    assert value.dtype == torch.bfloat16
    assert value[0].item() == pytest.approx(0.4266856, rel=1e-2)


def sum_of(kl):
    return lambda *arguments: kl(*arguments).sum()


def moderate(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


POINTWISE = {
    "dawson": lambda v: zf.dawson(v),
    "log_uniform": lambda v: zf.log_uniform_kl(v.exp()),
    "log_uniform_approx": zf.log_uniform_kl_approx,
    "ard": zf.ard_kl,
}
OF_MOMENTS = {
    "log_uniform_sum": zf.log_uniform_kl_sum,
    "log_uniform_sample": lambda m, v: zf.log_uniform_kl_sample(m, v, moderate(6, seed=3)),
    "student_t": lambda m, v: zf.student_t_kl(m, v, 0.3),
    "student_t_sample": lambda m, v: zf.student_t_kl_sample(m, v, 0.3, moderate(6, seed=3)),
    "normal": lambda m, v: zf.normal_kl(m, v, 0.7),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_derivatives(name):
    value = torch.tensor([-20.0, -6.0, -1.0, 0.1, 1.5, 3.0, 6.0], dtype=torch.float64)
    value.requires_grad_()
    assert torch.autograd.gradcheck(POINTWISE[name], value)
    assert torch.autograd.gradgradcheck(POINTWISE[name], value)


@pytest.mark.parametrize("name", OF_MOMENTS)
def test_derivatives_in_mean_and_log_variance(name):
    arguments = moderate(6).requires_grad_(), moderate(6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(OF_MOMENTS[name], arguments)
    assert torch.autograd.gradgradcheck(OF_MOMENTS[name], arguments)


def test_third_derivative_of_log_uniform_kl():
    def second(x):
        (first,) = torch.autograd.grad(zf.log_uniform_kl(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x, create_graph=True)[0]

    points = torch.tensor([0.0, 0.01, 1.0, 30.0, 1e3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(second, points, atol=1e-7)


FINITE = {
    "log_uniform": lambda m, v: zf.log_uniform_kl(m**2 * torch.exp(-v)),
    "log_uniform_exp": lambda m, v: zf.log_uniform_kl(torch.exp(-(v - 2 * m.abs().log()))),
    "log_uniform_approx": lambda m, v: zf.log_uniform_kl_approx(v - 2 * m.abs().log()),
    "ard": lambda m, v: zf.ard_kl(v - 2 * m.abs().log()),
    "log_uniform_sum": zf.log_uniform_kl_sum,
    "log_uniform_sample": lambda m, v: zf.log_uniform_kl_sample(m, v, -torch.ones_like(m)),
    "student_t": lambda m, v: zf.student_t_kl(m, v, 1e-16),
    "student_t_5": lambda m, v: zf.student_t_kl(m, v, 5.0),
    "student_t_sample": lambda m, v: zf.student_t_kl_sample(m, v, 1e-16, -torch.ones_like(m)),
    "normal": lambda m, v: zf.normal_kl(m, v, 1.0),
}


@pytest.mark.parametrize("log_scale", [0.0, -10.0])
@pytest.mark.parametrize("name", FINITE)
def test_finite_in_float32_for_every_alpha(name, log_scale):
    log_alpha = torch.linspace(-60, 60, 121)
    mean = torch.full_like(log_alpha, math.exp(log_scale)).requires_grad_()
    log_variance = (log_alpha + 2 * log_scale).requires_grad_()
    value = FINITE[name](mean, log_variance)
    value.sum().backward()
    for tensor in (value, mean.grad, log_variance.grad):
        assert tensor.isfinite().all()


@pytest.mark.parametrize(
    "kl",
    [
        zf.log_uniform_kl_sum,
        lambda m, v: zf.student_t_kl(m, v, 1e-16),
        lambda m, v: zf.student_t_kl(m, v, 1.0),
        lambda m, v: zf.log_uniform_kl_sample(m, v, torch.zeros_like(m)),
        lambda m, v: zf.student_t_kl_sample(m, v, 1e-16, torch.zeros_like(m)),
    ],
)
def test_finite_in_float32_at_zero_mean(kl):
    log_variance = torch.linspace(-160, 60, 221, requires_grad=True)
    mean = torch.zeros_like(log_variance).requires_grad_()
    value = kl(mean, log_variance)
    value.sum().backward()
    for tensor in (value, mean.grad, log_variance.grad):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("df", [1e-16, 1.0, 1e6])
def test_student_t_derivatives_are_finite_for_extreme_moments(df, branch, monkeypatch):
    if not branch:
        monkeypatch.setattr(zf, "can_branch", lambda: False)
    grid = torch.cartesian_prod(
        torch.tensor([0.0, 1e-30, -1e-10, 1.0, -1e3]), torch.linspace(-160, 80, 25)
    )
    mean, log_variance = (column.clone().requires_grad_() for column in grid.T)
    value = zf.student_t_kl(mean, log_variance, df)
    first = torch.autograd.grad(value.sum(), (mean, log_variance), create_graph=True)
    second = torch.autograd.grad(sum(f.sum() for f in first), (mean, log_variance))
    for tensor in (value, *first, *second):
        assert tensor.isfinite().all()


def test_approx_is_finite_far_out_and_zero_at_infinity():
    log_alpha = torch.linspace(-100, 100, 201, requires_grad=True)
    value = zf.log_uniform_kl_approx(log_alpha)
    value.sum().backward()
    assert value.isfinite().all()
    assert log_alpha.grad.isfinite().all()
    assert zf.log_uniform_kl_approx(torch.tensor(math.inf)) == 0


def test_approx_is_within_its_documented_error():
    log_alpha = torch.linspace(-20, 20, 400, dtype=torch.float64)
    error = zf.log_uniform_kl_approx(log_alpha) - zf.log_uniform_kl(torch.exp(-log_alpha))
    assert 0.009 < error.abs().max() < 0.0095


@pytest.mark.parametrize("shape", [(7,), (300, 257)])
# The exponent of 2 is rounded once more than that of e: |log σ²| units in the last place, up to 24.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-13)])
def test_fused_sum_equals_the_composed_one(shape, dtype, tolerance):
    mean = moderate(*shape).to(dtype).requires_grad_()
    log_variance = (6 * moderate(*shape, seed=1)).to(dtype).requires_grad_()
    fused = zf.log_uniform_kl_sum(mean, log_variance)
    fused_grads = torch.autograd.grad(3 * fused, (mean, log_variance))

    mean64, log_variance64 = (v.detach().double().requires_grad_() for v in (mean, log_variance))
    composed = zf.log_uniform_kl(mean64**2 * torch.exp(-log_variance64)).sum()
    composed_grads = torch.autograd.grad(3 * composed, (mean64, log_variance64))
    torch.testing.assert_close(fused.double(), composed, rtol=tolerance / 4, atol=0)
    for got, expected in zip(fused_grads, composed_grads, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-30)


def test_fused_sum_without_gradient_and_on_transposed_weights():
    mean, log_variance = moderate(4, 5).float(), moderate(4, 5, seed=1).float()
    expected = zf.log_uniform_kl(mean**2 * torch.exp(-log_variance)).sum()
    torch.testing.assert_close(zf.log_uniform_kl_sum(mean, log_variance), expected)
    leaf = mean.T.requires_grad_()
    value = zf.log_uniform_kl_sum(leaf, log_variance.T)
    torch.testing.assert_close(value.detach(), expected)
    value.backward()
    (grad,) = torch.autograd.grad(
        zf.log_uniform_kl(leaf**2 * torch.exp(-log_variance.T)).sum(), leaf
    )
    torch.testing.assert_close(leaf.grad, grad)


def test_sum_broadcasts_and_takes_no_weights():
    mean, log_variance = moderate(4, 5), moderate(5, seed=1)
    expected = zf.log_uniform_kl(mean**2 * torch.exp(-log_variance)).sum()
    torch.testing.assert_close(zf.log_uniform_kl_sum(mean, log_variance), expected)
    assert zf.log_uniform_kl_sum(torch.zeros(0), torch.zeros(0)) == 0


def test_sum_beyond_the_range_of_float32():
    mean = torch.tensor([1.0, 1.0], requires_grad=True)
    log_variance = torch.tensor([-100.0, 0.0], requires_grad=True)
    value = zf.log_uniform_kl_sum(mean, log_variance)
    value.backward()
    for tensor in (value, mean.grad, log_variance.grad):
        assert tensor.isfinite().all()


@ignore_torch_deprecations
def test_vmap_of_grad():
    mean, log_variance = moderate(4, 6), moderate(4, 6, seed=1)
    for name in ("log_uniform_sum", "student_t"):
        kl = sum_of(OF_MOMENTS[name])
        batched = torch.func.vmap(torch.func.grad(kl))(mean, log_variance)
        looped = torch.stack(
            [torch.func.grad(kl)(m, v) for m, v in zip(mean, log_variance, strict=True)]
        )
        leaf = mean.clone().requires_grad_()
        (expected,) = torch.autograd.grad(kl(leaf, log_variance), leaf)
        torch.testing.assert_close(batched, expected)
        torch.testing.assert_close(looped, expected)


def test_hessian_by_reverse_mode():
    points = torch.tensor([0.1, 1.0, 20.0], dtype=torch.float64)
    hessian = torch.func.jacrev(torch.func.grad(sum_of(zf.log_uniform_kl)))(points)
    # From D' = 1 - 2 z D.
    ratio = 2 * torch.func.vmap(torch.func.grad(zf.log_uniform_kl))(points)
    torch.testing.assert_close(hessian, torch.diag((1 - (1 + points) * ratio) / (4 * points)))


@ignore_torch_deprecations
def test_compile_without_graph_breaks():
    torch._dynamo.reset()
    mean = moderate(50).float().requires_grad_()
    log_variance = moderate(50, seed=1).float().requires_grad_()
    for kl in (
        zf.log_uniform_kl_sum,
        lambda m, v: zf.log_uniform_kl(m**2 * torch.exp(-v)).sum(),
    ):
        compiled = torch.compile(kl, fullgraph=True, backend="aot_eager")
        got, expected = compiled(mean, log_variance), kl(mean, log_variance)
        torch.testing.assert_close(got, expected)
        for ours, plain in zip(
            torch.autograd.grad(got, (mean, log_variance)),
            torch.autograd.grad(expected, (mean, log_variance)),
            strict=True,
        ):
            torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("std", [1e-3, 1.0])
@pytest.mark.parametrize("df", [1e-16, 1e-8, 1e-3, 1.0, 5.0])
def test_student_t_kl_matches_quadrature(df, std):
    log_alpha = torch.linspace(-20, 20, 21, dtype=torch.float64)
    mean = std * torch.exp(-log_alpha / 2)
    log_variance = torch.full_like(mean, 2 * math.log(std))
    value = zf.student_t_kl(mean, log_variance, df)
    expected = [student_t_by_quadrature(m, std, df) for m in mean.tolist()]
    # The reference cancels, so it has an absolute error of its own.
    np.testing.assert_allclose(value.numpy(), expected, rtol=1e-5, atol=1e-13)


def student_t_gradients(mean: float, log_variance: float, df: float) -> tuple[float, float]:
    """E of the derivatives of log(df + w²) in w, by Gauss–Legendre on pieces about its poles."""
    nodes, node_weights = np.polynomial.legendre.leggauss(16)
    std = math.exp(log_variance / 2)
    powers = 2.0 ** np.arange(-12, 40) * math.sqrt(df) / std
    edges = np.concatenate([[-mean / std], -mean / std - powers, -mean / std + powers])
    edges = np.unique(np.clip(np.append(edges, np.linspace(-13, 13, 79)), -13, 13))
    left, right = edges[:-1, None], edges[1:, None]
    noise = (left + right) / 2 + (right - left) / 2 * nodes
    weights = np.exp(-0.5 * noise**2) / math.sqrt(2 * math.pi) * node_weights * (right - left) / 2
    w = mean + std * noise
    in_mean = (df + 1) * np.sum(weights * w / (df + w**2))
    curvature = (df + 1) * np.sum(weights * (df - w**2) / (df + w**2) ** 2)
    return in_mean, 0.5 * (curvature * std**2 - 1)


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 2e-6)])
@pytest.mark.parametrize("df", [1e-3, 0.3, 1.0, 5.0, 30.0, 1e3])
def test_student_t_gradients_do_not_cancel(df, dtype, tolerance, branch, monkeypatch):
    if not branch:  # As under torch.compile.
        monkeypatch.setattr(zf, "can_branch", lambda: False)
    grid = torch.cartesian_prod(
        torch.tensor([1e-3, -0.03, 0.5, 3.0, -40.0]).double(),
        torch.tensor([-30.0, -15.0, -10.0, -5.0, -1.0, 0.5, 4.0]).double(),
    )
    mean, log_variance = (column.to(dtype).requires_grad_() for column in grid.T)
    value = zf.student_t_kl(mean, log_variance, df).sum()
    got = torch.autograd.grad(value, (mean, log_variance))
    expected = np.array([student_t_gradients(*point, df) for point in grid.tolist()]).T
    np.testing.assert_allclose(got[0], expected[0], rtol=tolerance)
    # Half a nat of it is the entropy's.
    np.testing.assert_allclose(got[1], expected[1], rtol=tolerance, atol=tolerance / 2)


def test_student_t_with_many_degrees_of_freedom_is_normal():
    mean = torch.linspace(-3, 3, 13, dtype=torch.float64, requires_grad=True)
    log_variance = torch.linspace(-12, 2, 13, dtype=torch.float64, requires_grad=True)

    def derivatives(kl):
        first = torch.autograd.grad(kl.sum(), (mean, log_variance), create_graph=True)
        second = torch.autograd.grad(sum(f.sum() for f in first), (mean, log_variance))
        return *first, *second

    student, normal = zf.student_t_kl(mean, log_variance, 1e9), zf.normal_kl(mean, log_variance, 1)
    for got, expected in zip(derivatives(student), derivatives(normal), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def test_student_t_normalised_adds_minus_log_df():
    """What `zm.StudentT` leaves out, from scipy's density and the one that the KL has."""
    df, w = 1e-16, 0.7
    left_out = -0.5 * (df + 1) * math.log(df + w**2) - scipy.stats.t(df).logpdf(w)
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    constant = left_out - entropy - zf.HALF_LOG_MOMENT
    assert constant == pytest.approx(-math.log(df) - 1.361, abs=1e-3)


def test_student_t_kl_tends_to_the_log_uniform_one():
    log_alpha = torch.linspace(-20, 10, 31, dtype=torch.float64)
    expected = zf.log_uniform_kl(torch.exp(-log_alpha))
    mean, log_variance = torch.exp(-log_alpha / 2), torch.zeros_like(log_alpha)
    value = zf.student_t_kl(mean, log_variance, 1e-30)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-14)


def test_student_t_series_and_integral_agree_where_they_meet(monkeypatch):
    log_variance = torch.linspace(-16, 6, 23, dtype=torch.float64, requires_grad=True)
    mean = torch.linspace(-0.1, 2, 23, dtype=torch.float64, requires_grad=True)
    assert (log_variance < math.log(1e-8) - student_t_integrals.LARGEST_LOG_RATIO).any()

    def value_and_gradients():
        value = zf.student_t_kl(mean, log_variance, 1e-8)
        gradients = torch.autograd.grad(value.sum(), (mean, log_variance), create_graph=True)
        second = torch.autograd.grad(gradients[1].sum(), log_variance)
        return value, *gradients, *second

    *first, second = value_and_gradients()
    monkeypatch.setattr(zf, "can_branch", lambda: False)
    *integrals, second_integral = value_and_gradients()
    for ours, integral in zip(first, integrals, strict=True):
        torch.testing.assert_close(ours, integral, rtol=2e-6, atol=1e-7)
    # The integral is cut off where its value, not its curvature, has converged.
    torch.testing.assert_close(second, second_integral, rtol=5e-5, atol=1e-7)


def test_student_t_kl_of_a_mean_that_is_none():
    log_variance = torch.linspace(-14, 3, 10, dtype=torch.float64)
    expected = zf.student_t_kl(torch.zeros_like(log_variance), log_variance, 1e-8)
    torch.testing.assert_close(zf.student_t_kl(None, log_variance, 1e-8), expected)
    assert (expected > 0).all()


@pytest.mark.parametrize("log_alpha", [-3.0, 0.0, 4.0, None])
@pytest.mark.parametrize("prior", ["log_uniform", "student_t"])
def test_one_sample_estimates_are_unbiased(prior, log_alpha):
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(NUM_DRAWS, dtype=torch.float64, generator=generator)
    log_variance = torch.tensor(-2.0, dtype=torch.float64)
    mean = None if log_alpha is None else torch.exp((log_variance - log_alpha) / 2)
    inverse_alpha = torch.tensor(0 if mean is None else math.exp(-log_alpha)).double()
    if prior == "log_uniform":
        draws = zf.log_uniform_kl_sample(mean, log_variance, noise)
        expected = zf.log_uniform_kl(inverse_alpha)
    else:
        draws = zf.student_t_kl_sample(mean, log_variance, 0.5, noise)
        expected = zf.student_t_kl(mean, log_variance, 0.5)
    standard_error = draws.std() / math.sqrt(NUM_DRAWS)
    assert (draws.mean() - expected).abs() < 4 * standard_error


@pytest.mark.parametrize("scale", [0.3, torch.tensor(2.0, dtype=torch.float64)])
def test_normal_kl_matches_torch_distributions(scale):
    mean, log_variance = moderate(20), moderate(20, seed=1)
    posterior = Normal(mean, torch.exp(log_variance / 2))
    expected = kl_divergence(posterior, Normal(torch.zeros_like(mean), scale))
    torch.testing.assert_close(zf.normal_kl(mean, log_variance, scale), expected)
    centred = zf.normal_kl(torch.zeros_like(mean), log_variance, scale)
    torch.testing.assert_close(zf.normal_kl(None, log_variance, scale), centred)


def test_ard_kl_is_the_kl_to_the_best_normal_prior():
    mean, alpha = moderate(20), torch.logspace(-4, 4, 20, dtype=torch.float64)
    posterior = Normal(mean, alpha.sqrt() * mean.abs())
    prior = Normal(torch.zeros_like(mean), (1 + alpha).sqrt() * mean.abs())
    torch.testing.assert_close(zf.ard_kl(alpha.log()), kl_divergence(posterior, prior))


def test_table_is_the_one_the_fit_produces(processes):
    script = Path(__file__).parents[2] / "tools" / "fit_dawson.py"
    processes.run([sys.executable, script, "--check"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    z = torch.linspace(-3, 3, 7, dtype=dtype)
    torch.testing.assert_close(zf.dawson(z), zf.dawson(z.float()).to(dtype))
    torch.testing.assert_close(
        zf.student_t_kl(z, z, 1e-3), zf.student_t_kl(z.float(), z.float(), 1e-3).to(dtype)
    )


@pytest.mark.parametrize("scale", [0.3, None])
def test_fused_normal_kl_is_that_of_torch(scale):
    mean = moderate(40, 7).double().mul_(0.2).requires_grad_()
    log_variance = (moderate(40, 7, seed=1).double() - 3).requires_grad_()
    arguments = (mean, log_variance)

    def by_torch() -> torch.Tensor:
        best = (mean.square() + log_variance.exp()).mean().sqrt() if scale is None else scale
        posterior = Normal(mean, (0.5 * log_variance).exp())
        return kl_divergence(posterior, Normal(torch.zeros_like(mean), best)).sum()

    def derivatives(total: torch.Tensor) -> list[torch.Tensor]:
        plain = torch.autograd.grad(3 * total, arguments, retain_graph=True)
        first = torch.autograd.grad(3 * total, arguments, create_graph=True)
        return [*plain, *torch.autograd.grad(sum(g.square().sum() for g in first), arguments)]

    fused = normal_kl_sum(mean, log_variance, scale)
    torch.testing.assert_close(fused, by_torch())
    for got, expected in zip(derivatives(fused), derivatives(by_torch()), strict=True):
        torch.testing.assert_close(got, expected)


def test_normal_kl_of_tiny_scales_is_finite():
    mean = torch.full((3,), 1e-21, requires_grad=True)
    value = normal_kl_sum(mean, torch.full((3,), -96.7), 1e-21)
    value.backward()
    assert value.isfinite()
    assert mean.grad.isfinite().all()
