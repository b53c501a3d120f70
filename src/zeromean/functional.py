"""Pure tensor maths: KL terms, Dawson's function, small helpers that are careful with numbers.

Every KL is per weight, of a Gaussian posterior with alpha = variance / mean². A `mean` of None is
exactly zero. The log-uniform prior is improper, so its KL is fixed by being 0 at alpha = inf, and
the Student-t KL is normalised to tend to it as `df` tends to 0.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from zeromean import _dawson, _student_t

# E log|noise| = -HALF_LOG_MOMENT for standard normal noise: (Euler's gamma + log 2) / 2.
HALF_LOG_MOMENT = (0.5772156649015329 + math.log(2)) / 2


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

    It is ½ (df + 1) E log(df + w²) - ½ log_variance + HALF_LOG_MOMENT. With x = mean² / variance
    and r = df / variance, the expectation is taken apart where x and r are small, as they are for
    nearly all weights at the default `df` of the prior, into
    log_variance + 2 (log-uniform KL(x) + C(x, r) - HALF_LOG_MOMENT), and elsewhere, where these
    would cancel, into log df + 2 T. C and T: `zeromean._student_t`.
    """
    if log_variance.dtype not in _dawson.VALUE:
        mean = None if mean is None else mean.float()
        return student_t_kl(mean, log_variance.float(), df).to(log_variance.dtype)
    here = torch.zeros_like(log_variance) if mean is None else mean
    shape = torch.broadcast_shapes(here.shape, log_variance.shape)
    here, spread = here.expand(shape), log_variance.expand(shape)
    log_df = math.log(df)
    if not can_branch():
        excessive = _exceeds_log_uniform(here, spread, df)
        # Neither form may meet the other's arguments, or 0 · ∞ would enter the gradient.
        excess = _excess_student_t_kl(
            torch.where(excessive, here, 0.0), torch.where(excessive, spread, log_df), df
        )
        whole = _whole_student_t_kl(
            torch.where(excessive, 0.0, here), torch.where(excessive, log_df, spread), df
        )
        return torch.where(excessive, excess, whole)
    if spread.numel() == 0 or spread.min() >= log_df - _student_t.LARGEST_LOG_RATIO:
        return _whole_student_t_kl(here, spread, df)
    excessive = _exceeds_log_uniform(here, spread, df)
    if excessive.all():
        return _excess_student_t_kl(here, spread, df)
    kl = torch.empty_like(spread)
    for kl_of, where in ((_whole_student_t_kl, ~excessive), (_excess_student_t_kl, excessive)):
        kl = kl.index_put((where,), kl_of(here[where], spread[where], df))
    return kl


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


def _exceeds_log_uniform(mean: Tensor, log_variance: Tensor, df: float) -> Tensor:
    """Where the log-uniform KL would cancel: x + r > 1, and r not so small that C is a series."""
    x = _squared(_mean_over_std(mean.detach(), log_variance.detach())[0])
    log_ratio = math.log(df) - log_variance.detach()
    return (log_ratio > _student_t.LARGEST_LOG_RATIO) & (x + log_ratio.exp() > 1)


def _whole_student_t_kl(mean: Tensor, log_variance: Tensor, df: float) -> Tensor:
    """`student_t_kl` by the log-uniform KL."""
    inverse_alpha = _squared(_mean_over_std(mean, log_variance)[0])
    correction = _student_t_correction(inverse_alpha, math.log(df) - log_variance)
    kl = log_uniform_kl(inverse_alpha) + correction
    return kl + df * (kl + 0.5 * log_variance - HALF_LOG_MOMENT)


def _excess_student_t_kl(mean: Tensor, log_variance: Tensor, df: float) -> Tensor:
    """`student_t_kl` by the excess over log df."""
    excess = _StudentTExcess.apply(mean, log_variance, df)[0]
    constant = 0.5 * (df + 1) * math.log(df) + HALF_LOG_MOMENT
    return (df + 1) * excess - 0.5 * log_variance + constant


def _student_t_correction(inverse_alpha: Tensor, log_ratio: Tensor) -> Tensor:
    if not can_branch():
        return _StudentTCorrection.apply(inverse_alpha, log_ratio)[0]
    large = log_ratio > _student_t.LARGEST_LOG_RATIO
    if large.all():
        return _StudentTCorrection.apply(inverse_alpha, log_ratio)[0]
    series = _student_t.correction_series(
        inverse_alpha, log_ratio.clamp(max=_student_t.LARGEST_LOG_RATIO)
    )
    if not large.any():
        return series
    rest = _StudentTCorrection.apply(inverse_alpha[large], log_ratio[large])[0]
    return series.index_put((large,), rest)


class _StudentTCorrection(torch.autograd.Function):
    """C, with its derivatives in inverse_alpha and in log r."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inverse_alpha: Tensor, log_ratio: Tensor) -> tuple[Tensor, ...]:
        return _in_chunks(_student_t.correction_integrals, inverse_alpha, log_ratio)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _save_derivatives(ctx, inputs, output)

    @staticmethod
    def backward(ctx, grad, *_) -> tuple[Tensor | None, Tensor | None]:
        return _by_derivatives(ctx, grad, _student_t.correction_integrals)


class _StudentTExcess(torch.autograd.Function):
    """T, with its derivatives in mean and log-variance."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, log_variance: Tensor, df: float) -> tuple[Tensor, ...]:
        return _in_chunks(partial(_student_t.excess_integrals, df=df), mean, log_variance)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.df = inputs
        _save_derivatives(ctx, tensors, output)

    @staticmethod
    def backward(ctx, grad, *_) -> tuple[Tensor | None, Tensor | None, None]:
        return *_by_derivatives(ctx, grad, partial(_student_t.excess_integrals, df=ctx.df)), None


def _in_chunks(integrals, *arguments: Tensor) -> tuple[Tensor, ...]:
    """Value and two derivatives of a function of two tensors, in pieces that fit the cache."""
    chunks = zip(
        *(argument.reshape(-1).split(_dawson.CHUNK_SIZE) for argument in arguments), strict=True
    )
    results = zip(*(integrals(*chunk) for chunk in chunks), strict=True)
    return tuple(torch.cat(parts).reshape(arguments[0].shape) for parts in results)


def _save_derivatives(ctx, inputs, output) -> None:
    _, *derivatives = output
    ctx.mark_non_differentiable(*derivatives)
    ctx.save_for_backward(*inputs, *derivatives)
    ctx.set_materialize_grads(False)


def _by_derivatives(ctx, grad, integrals) -> tuple[Tensor | None, Tensor | None]:
    if grad is None:
        return None, None
    first, second, *derivatives = ctx.saved_tensors
    if torch.is_grad_enabled():
        # Costs memory for every node, but makes the second derivative right.
        _, *derivatives = integrals(first, second)
    return grad * derivatives[0], grad * derivatives[1]


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
