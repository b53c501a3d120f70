"""Pure tensor maths: KL terms, Dawson's function, small helpers that are careful with numbers.

Every KL is per weight, of a Gaussian posterior with alpha = variance / mean². A `mean` of None is
exactly zero. The log-uniform prior is improper, so its KL is fixed by being 0 at alpha = inf, and
the Student-t KL is normalised to tend to it as `df` tends to 0.
"""

import math
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from zeromean import _dawson

# E log|noise| = -HALF_LOG_MOMENT for standard normal noise: (Euler's gamma + log 2) / 2.
HALF_LOG_MOMENT = (0.5772156649015329 + math.log(2)) / 2

# The Student-t KL is a series in df / variance up to this log of it, and a quadrature above.
LARGEST_LOG_RATIO = math.log(1e-5)
# Nodes of that quadrature, and how many of them are summed at a time under torch.compile: with
# fewer it compiles longer, with more it needs memory.
NUM_NODES = 96
NODES_AT_ONCE = 8


def safe_sqrt(variance: Tensor) -> Tensor:
    """Square root that is 0, with gradient 0, wherever `variance` is not a positive normal number.

    Fast convolutions can return tiny negatives; sqrt would turn them into NaN.
    """
    positive = variance > smallest_normal(variance.dtype)
    # The inner `where` keeps sqrt's infinite slope at 0 out of the gradient's 0 * inf.
    return torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)


def smallest_normal(dtype: torch.dtype) -> float:
    """Below it numbers lose digits and speed. 0 for float16, whose denormals are in daily use."""
    return 0.0 if dtype == torch.float16 else torch.finfo(dtype).tiny


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least: sums over many weights overflow in half precision."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def log_mean_exp(values: Tensor, dim: int) -> Tensor:
    """log of the mean of exp(values) along a dimension, without overflow."""
    return values.logsumexp(dim) - math.log(values.shape[dim])


def dawson(z: Tensor) -> Tensor:
    """Dawson's function D(z) = exp(-z²) ∫₀ᶻ exp(v²) dv, for which D' = 1 - 2 z D."""
    if z.dtype not in _dawson.VALUE:
        return dawson(z.float()).to(z.dtype)
    largest = torch.finfo(z.dtype).max ** 0.5 / 4
    far = z.abs() > largest
    near = torch.where(far, 0.0, z)
    # 1 / (2 z) is exact to the last digit long before z² overflows.
    return torch.where(far, 0.5 / torch.where(far, z, 1.0), 2 * near * _slope(2 * near.square()))


def log_uniform_kl(inverse_alpha: Tensor) -> Tensor:
    """Exact KL to the log-uniform prior, as a function of mean² / variance.

    It is 2 ∫₀ᶻ D(v) dv with Dawson's D and z² = inverse_alpha / 2 (Hron, Matthews & Ghahramani,
    2017), differentiable to any order, and 0 at 0.
    """
    if inverse_alpha.dtype not in _dawson.VALUE:
        return log_uniform_kl(inverse_alpha.float()).to(inverse_alpha.dtype)
    return _dawson.LogUniformKL.apply(inverse_alpha)[0]


def log_uniform_kl_sum(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Sum over weights of `log_uniform_kl(mean**2 / exp(log_variance))`, fused on CPU."""
    if _can_fuse(mean, log_variance):
        needs_gradient = torch.is_grad_enabled() and (
            mean.requires_grad or log_variance.requires_grad
        )
        total = _LogUniformKLSum.apply(mean, log_variance, needs_gradient)
        # Only an overflow (alpha below 1e-37 in float32) gets here without a finite sum.
        if math.isfinite(total.detach()):
            return total
    return log_uniform_kl(_squared(_mean_over_std(mean, log_variance)[0])).sum()


def log_uniform_kl_approx(log_alpha: Tensor) -> Tensor:
    """Sigmoid approximation of `log_uniform_kl` (Molchanov et al., 2017), within 0.0094 nat."""
    return 0.63576 * torch.sigmoid(-1.87320 - 1.48695 * log_alpha) + ard_kl(log_alpha)


def log_uniform_kl_sample(mean: Tensor | None, log_variance: Tensor, noise: Tensor) -> Tensor:
    """One-sample estimate of `log_uniform_kl` at the weight mean + std * noise."""
    # In units of the standard deviation, log|weight| - log std needs no subtraction.
    ratio = noise if mean is None else _mean_over_std(mean, log_variance)[0] + noise
    smallest = torch.finfo(ratio.dtype).tiny ** 0.5
    return ratio.abs().clamp_min(smallest).log() + HALF_LOG_MOMENT


def student_t_kl(mean: Tensor | None, log_variance: Tensor, df: float) -> Tensor:
    """KL to Student's t with `df` degrees of freedom and unit scale, by smooth quadrature.

    In units of the standard deviation, with x = mean² / variance and r = df / variance,
    E log(r + (√x + ε)²) = 2 (log-uniform KL(x) + C(x, r) - HALF_LOG_MOMENT), where
    C = ½ ∫₀^∞ (1 + 2t)^(-½) exp(-t x / (1 + 2t)) (1 - exp(-t r)) dt / t; where r is small, as it
    is for nearly all weights at the default `df` of the prior, by a series in √r.
    """
    if log_variance.dtype not in _dawson.VALUE:
        mean = None if mean is None else mean.float()
        return student_t_kl(mean, log_variance.float(), df).to(log_variance.dtype)
    if mean is None:
        mean = torch.zeros_like(log_variance)
    inverse_alpha = _squared(_mean_over_std(mean, log_variance)[0])
    log_ratio = (math.log(df) - log_variance).expand_as(inverse_alpha)
    kl = log_uniform_kl(inverse_alpha) + _student_t_correction(inverse_alpha, log_ratio)
    return kl + df * (kl + 0.5 * log_variance - HALF_LOG_MOMENT)


def student_t_kl_sample(
    mean: Tensor | None, log_variance: Tensor, df: float, noise: Tensor
) -> Tensor:
    """One-sample estimate of `student_t_kl` at the weight mean + std * noise."""
    weight = (0.5 * log_variance).exp() * noise
    if mean is not None:
        weight = weight + mean
    tail = (weight.square() + df).clamp_min(torch.finfo(weight.dtype).tiny).log()
    return 0.5 * ((df + 1) * tail - log_variance) + HALF_LOG_MOMENT


def ard_kl(log_alpha: Tensor) -> Tensor:
    """KL to the zero-mean normal prior with the best variance per weight: ½ log(1 + 1 / alpha)."""
    return -0.5 * logsigmoid(log_alpha)


def normal_kl(mean: Tensor | None, log_variance: Tensor, scale: float | Tensor) -> Tensor:
    """KL to a normal prior with mean 0 and standard deviation `scale`."""
    log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
    log_ratio = log_variance - 2 * log_scale
    kl = 0.5 * (log_ratio.expm1() - log_ratio)
    return kl if mean is None else kl + 0.5 * (mean / scale).square()


def _can_fuse(mean: Tensor, log_variance: Tensor) -> bool:
    """Whether the arguments are ordinary CPU tensors that nothing traces or transforms."""
    return (
        mean.shape == log_variance.shape
        and mean.dtype == log_variance.dtype
        and mean.dtype in _dawson.VALUE
        and mean.device.type == log_variance.device.type == "cpu"
        and mean.numel() > 0
        and can_branch()
    )


def can_branch() -> bool:
    """Whether values may decide what is computed: nothing traces or transforms."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


class _LogUniformKLSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean: Tensor, log_variance: Tensor, needs_gradient: bool) -> Tensor:
        total, half_gradient = _dawson.kl_sum(
            mean.contiguous(), log_variance.contiguous(), needs_gradient=needs_gradient
        )
        ctx.save_for_backward(mean, log_variance, half_gradient)
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor, Tensor, None]:
        mean, log_variance, half_gradient = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Someone will differentiate the gradient, so it has to be a function of the inputs.
            ratio, inverse_std = _mean_over_std(mean, log_variance)
            half_gradient = _slope(_squared(ratio)) * ratio * inverse_std
        grad_mean = half_gradient * (2 * grad_total)
        return grad_mean, torch.addcmul(grad_mean.new_zeros(()), mean, grad_mean, value=-0.5), None


def _student_t_correction(inverse_alpha: Tensor, log_ratio: Tensor) -> Tensor:
    """C of `student_t_kl`."""
    if not can_branch():
        return _StudentTCorrection.apply(inverse_alpha, log_ratio)[0]
    large = log_ratio > LARGEST_LOG_RATIO
    if large.all():
        return _StudentTCorrection.apply(inverse_alpha, log_ratio)[0]
    series = _student_t_series(inverse_alpha, log_ratio.clamp(max=LARGEST_LOG_RATIO))
    if not large.any():
        return series
    rest = _StudentTCorrection.apply(inverse_alpha[large], log_ratio[large])[0]
    return series.index_put((large,), rest)


def _student_t_series(inverse_alpha: Tensor, log_ratio: Tensor) -> Tensor:
    """C up to an error of r² / 10.

    C = ½ E log(1 + r / w²) for w = √x + ε, and log(1 + r / w²) has the Fourier transform
    2π (1 - exp(-√r |k|)) / |k|: in powers of √r it is a delta function, the finite part of 1 / w²
    and the delta function's second derivative.
    """
    root = (0.5 * log_ratio).exp()
    density = torch.exp(-0.5 * inverse_alpha) / math.sqrt(2 * math.pi)
    finite_part = 2 * inverse_alpha * _slope(inverse_alpha) - 1  # -D'(√(x / 2)), with Dawson's D
    third = density * (1 - inverse_alpha)
    return root * (math.pi * density + root * (0.5 * finite_part + root * (math.pi / 6) * third))


class _StudentTCorrection(torch.autograd.Function):
    """C of `student_t_kl`, with its derivatives in inverse_alpha and in log r."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inverse_alpha: Tensor, log_ratio: Tensor) -> tuple[Tensor, ...]:
        chunks = zip(
            inverse_alpha.reshape(-1).split(_dawson.CHUNK_SIZE),
            log_ratio.reshape(-1).split(_dawson.CHUNK_SIZE),
            strict=True,
        )
        integrals = zip(*(_student_t_integrals(*chunk) for chunk in chunks), strict=True)
        value, *derivatives = (torch.cat(parts).reshape(log_ratio.shape) for parts in integrals)
        return value, *derivatives

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, *derivatives = output
        ctx.mark_non_differentiable(*derivatives)
        ctx.save_for_backward(*inputs, *derivatives)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, *_) -> tuple[Tensor | None, Tensor | None]:
        if grad is None:
            return None, None
        inverse_alpha, log_ratio, *derivatives = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Costs memory for every node, but makes the second derivative right.
            _, *derivatives = _student_t_integrals(inverse_alpha, log_ratio)
        return grad * derivatives[0], grad * derivatives[1]


def _student_t_integrals(inverse_alpha: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Trapezoid rule in u = log t, which converges geometrically, on a range fit to each weight."""
    with torch.no_grad():
        first, last = _student_t_range(inverse_alpha, log_ratio)
        step = (last - first) / (NUM_NODES - 1)
    # exp(-40) vanishes beside 1; the bounds keep inf * 0 (and slow denormals) out of the sums.
    largest_log = math.log(40)
    smallest_u = 8 - math.log(torch.finfo(step.dtype).max)

    def terms(nodes: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = first + nodes * step
        inverse_root = torch.exp(-0.5 * u.clamp(min=smallest_u))  # 1 / √t
        saturation = 1 / (2 + inverse_root * inverse_root)  # t / (1 + 2t)
        density = inverse_root * saturation.sqrt() * torch.exp(-saturation * inverse_alpha)
        exponent = (u + log_ratio).clamp(max=largest_log).exp()  # t r
        mass = -density * torch.expm1(-exponent)
        return mass, -mass * saturation, density * exponent * torch.exp(-exponent)

    if torch.compiler.is_compiling():
        # A compiler would take long over so many copies of the same steps.
        nodes = torch.arange(NUM_NODES, dtype=step.dtype, device=step.device)
        several = nodes.view(-1, *[1] * step.dim()).split(NODES_AT_ONCE)
        parts = [tuple(term.sum(0) for term in terms(some)) for some in several]
    else:
        parts = (terms(node) for node in range(NUM_NODES))
    totals = reduce(lambda sums, part: tuple(map(torch.add, sums, part)), parts)
    value, by_inverse_alpha, by_log_ratio = (0.5 * step * total for total in totals)
    return value, by_inverse_alpha, by_log_ratio


def _student_t_range(inverse_alpha: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Where, in log t, the integrand of C matters beside the whole KL (to about exp(-16))."""
    log_tolerance = -16.0
    # The order of magnitude of the KL, at most 1: it grows like √r and like inverse_alpha.
    log_kl = torch.maximum(inverse_alpha.log(), 0.5 * log_ratio).clamp(max=0.0)
    # To the right the integrand falls like exp(-inverse_alpha / 2) / √(2t) ...
    slow_end = -2 * (log_tolerance + log_kl) - inverse_alpha
    # ... or, once that is negligible, vanishes earlier, like exp(-t inverse_alpha / (1 + 2t)).
    inverse = 1 / inverse_alpha.clamp_min(1.0)
    fast_end = torch.log(20 * inverse + 4000 * inverse.square())
    last = torch.maximum(slow_end, fast_end)
    # To the left the integral up to t is at most r (√(1 + 2t) - 1) / 2.
    log_mass = log_tolerance + log_kl - log_ratio
    first = math.log(2) + log_mass + softplus(log_mass)
    return torch.minimum(first, last - 45.0), last


def _slope(inverse_alpha: Tensor) -> Tensor:
    """Derivative of `log_uniform_kl`."""
    return _dawson.LogUniformKL.apply(inverse_alpha)[1]


def _mean_over_std(mean: Tensor, log_variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean / std and 1 / std, where 1 / std is capped so that (mean / std)² stays finite."""
    largest = torch.finfo(mean.dtype).max ** 0.5 / 4
    cap = largest / mean.detach().abs().clamp_min(4 / largest)
    # Capped before exp too: an infinite value would make the gradient 0 · ∞.
    log_inverse_std = (-0.5 * log_variance).clamp_max(2 * math.log(largest) - math.log(4))
    inverse_std = torch.minimum(log_inverse_std.exp(), cap)
    return mean * inverse_std, inverse_std


def _squared(ratio: Tensor) -> Tensor:
    return ratio * ratio
