"""E log(df + w²) of a normal weight, in the two forms that `functional.student_t_kl` is made of.

Where df and mean² are small next to the variance, it is the log-uniform KL and a correction;
elsewhere, where those two would cancel, the excess over log df. Integrals over t by the trapezoid
rule in log t, which converges geometrically, on a range fit to each weight.
"""

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import softplus

from zeromean.functional import _dawson

# The correction is a series in df / variance up to this log of it, and an integral above.
LARGEST_LOG_RATIO = math.log(1e-5)
# Nodes of the integrals, and how many of them are summed at a time under torch.compile: with
# fewer it compiles longer, with more it needs memory.
NUM_NODES = 96
NODES_AT_ONCE = 8


def correction_series(inverse_alpha: Tensor, log_ratio: Tensor) -> Tensor:
    """C of `correction_integrals` up to an error of r² / 10.

    C = ½ E log(1 + r / w²) for w = √x + ε, and log(1 + r / w²) has the Fourier transform
    2π (1 - exp(-√r |k|)) / |k|: in powers of √r it is a delta function, the finite part of 1 / w²
    and the delta function's second derivative.
    """
    root = (0.5 * log_ratio).exp()
    density = torch.exp(-0.5 * inverse_alpha) / math.sqrt(2 * math.pi)
    # -D'(√(x / 2)), with Dawson's D.
    finite_part = 2 * inverse_alpha * _dawson.LogUniformKL.apply(inverse_alpha)[1] - 1
    third = density * (1 - inverse_alpha)
    return root * (math.pi * density + root * (0.5 * finite_part + root * (math.pi / 6) * third))


def correction_integrals(inverse_alpha: Tensor, log_ratio: Tensor) -> tuple[Tensor, ...]:
    """C(x, r) = ½ E log(1 + r / (√x + ε)²), and its derivatives in x and log r.

    C = ½ ∫₀^∞ (1 + 2t)^(-½) exp(-t x / (1 + 2t)) (1 - exp(-t r)) dt / t.
    """
    with torch.no_grad():
        first, last = _correction_range(inverse_alpha, log_ratio)
    # exp(-40) vanishes next to 1; the bounds keep inf * 0 (and slow denormals) out of the sums.
    largest_log = math.log(40)
    smallest_u = 8 - math.log(torch.finfo(first.dtype).max)

    def terms(u: Tensor) -> tuple[Tensor, ...]:
        inverse_root = torch.exp(-0.5 * u.clamp(min=smallest_u))  # 1 / √t
        saturation = 1 / (2 + inverse_root * inverse_root)  # t / (1 + 2t)
        density = inverse_root * saturation.sqrt() * torch.exp(-saturation * inverse_alpha)
        exponent = (u + log_ratio).clamp(max=largest_log).exp()  # t r
        mass = -density * torch.expm1(-exponent)
        return mass, -mass * saturation, density * exponent * torch.exp(-exponent)

    return _half_integrals(terms, first, last)


def excess_integrals(mean: Tensor, log_variance: Tensor, df: float) -> tuple[Tensor, ...]:
    """T = ½ E log(1 + w² / df), and its derivatives in mean and log-variance.

    With m the sum of df, mean² and variance, and o, q and p their shares of it,
    T = ½ log(m / df) + ½ ∫₀^∞ (exp(-t) - exp(-t o) M(t)) dt / t for
    M(t) = (1 + 2 t p)^(-½) exp(-t q / (1 + 2 t p)). Nothing cancels where T or a derivative is
    small: M, and what is left of the derivatives once m is taken out, is of order one.
    """
    largest = torch.finfo(mean.dtype).max ** 0.5 / 4
    mean = mean.clamp(-largest, largest)
    variance = log_variance.clamp(max=math.log(largest)).exp()
    mean_square = mean * mean
    moment = df + mean_square + variance
    share_of_df, share_of_mean, p = df / moment, mean_square / moment, variance / moment
    with torch.no_grad():
        # To the left the integrands vanish like t; to the right like exp(-t o) ...
        first = torch.full_like(moment, -26.0)
        last = (30 / share_of_df).log()
        # ... or, where the mean is many standard deviations, like exp(-t q / (1 + 2 t p)).
        many = share_of_mean > 120 * p
        last = torch.where(many, last.clamp(max=math.log(120)), last)

    def terms(u: Tensor) -> tuple[Tensor, ...]:
        t = u.exp()
        widening = 2 * t * p
        shrunk = t / (1 + widening)
        exponent = shrunk * share_of_mean
        log_root = 0.5 * widening.log1p()
        density = torch.exp(-t * share_of_df - exponent - log_root)
        # Log of exp(-t) / density.
        deficit = torch.expm1(log_root - 0.5 * widening - exponent * widening)
        pull = density * shrunk
        return density * deficit, pull, pull * (1 - 2 * exponent)

    value, by_mean, by_log_variance = _half_integrals(terms, first, last)
    # Exact where the share of df is nearly one, and finite where it is nearly nothing.
    rest = (share_of_mean + p).clamp(max=0.5)
    log_moment = torch.where(rest < 0.5, -torch.log1p(-rest), moment.log() - math.log(df))
    return 0.5 * log_moment + value, 2 * by_mean * (mean / moment), by_log_variance * p


def _half_integrals(
    terms: Callable[[Tensor], tuple[Tensor, ...]], first: Tensor, last: Tensor
) -> tuple[Tensor, ...]:
    """½ ∫ of each term over log t from first to last."""
    step = (last - first) / (NUM_NODES - 1)
    if torch.compiler.is_compiling():
        # A compiler would take long over so many copies of the same steps.
        nodes = torch.arange(NUM_NODES, dtype=step.dtype, device=step.device)
        several = nodes.view(-1, *[1] * step.dim()).split(NODES_AT_ONCE)
        parts = [tuple(term.sum(0) for term in terms(first + some * step)) for some in several]
    else:
        parts = (terms(first + node * step) for node in range(NUM_NODES))
    totals = reduce(lambda sums, part: tuple(map(torch.add, sums, part)), parts)
    return tuple(0.5 * step * total for total in totals)


def _correction_range(inverse_alpha: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Where, in log t, the integrand of C matters next to the whole KL (to about exp(-16))."""
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
