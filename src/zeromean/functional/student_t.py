"""The KL term of Student's t prior: by quadrature, a series near log-uniform, or samples."""

import math
from functools import partial

import torch
from torch import Tensor

from zeromean.functional import _dawson, student_t_integrals
from zeromean.functional.kl import HALF_LOG_MOMENT, log_uniform_kl
from zeromean.functional.numerics import (
    _by_derivatives,
    _in_chunks,
    _mean_over_std,
    _save_derivatives,
    _squared,
    can_branch,
)


def student_t_kl(mean: Tensor | None, log_variance: Tensor, df: float) -> Tensor:
    """KL to Student's t with `df` degrees of freedom and unit scale, by smooth quadrature.

    It is ½ (df + 1) E log(df + w²) - ½ log_variance + HALF_LOG_MOMENT. With x = mean² / variance
    and r = df / variance, the expectation is taken apart where x and r are small, as they are for
    nearly all weights at the default `df` of the prior, into
    log_variance + 2 (log-uniform KL(x) + C(x, r) - HALF_LOG_MOMENT), and elsewhere, where these
    would cancel, into log df + 2 T. C and T: `zeromean.functional.student_t_integrals`.
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
    if spread.numel() == 0 or spread.min() >= log_df - student_t_integrals.LARGEST_LOG_RATIO:
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


def _exceeds_log_uniform(mean: Tensor, log_variance: Tensor, df: float) -> Tensor:
    """Where the log-uniform KL would cancel: x + r > 1, and r not so small that C is a series."""
    x = _squared(_mean_over_std(mean.detach(), log_variance.detach())[0])
    log_ratio = math.log(df) - log_variance.detach()
    return (log_ratio > student_t_integrals.LARGEST_LOG_RATIO) & (x + log_ratio.exp() > 1)


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
    large = log_ratio > student_t_integrals.LARGEST_LOG_RATIO
    if large.all():
        return _StudentTCorrection.apply(inverse_alpha, log_ratio)[0]
    series = student_t_integrals.correction_series(
        inverse_alpha, log_ratio.clamp(max=student_t_integrals.LARGEST_LOG_RATIO)
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
        return _in_chunks(student_t_integrals.correction_integrals, inverse_alpha, log_ratio)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _save_derivatives(ctx, inputs, output)

    @staticmethod
    def backward(ctx, grad, *_) -> tuple[Tensor | None, Tensor | None]:
        return _by_derivatives(ctx, grad, student_t_integrals.correction_integrals)


class _StudentTExcess(torch.autograd.Function):
    """T, with its derivatives in mean and log-variance."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, log_variance: Tensor, df: float) -> tuple[Tensor, ...]:
        return _in_chunks(partial(student_t_integrals.excess_integrals, df=df), mean, log_variance)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.df = inputs
        _save_derivatives(ctx, tensors, output)

    @staticmethod
    def backward(ctx, grad, *_) -> tuple[Tensor | None, Tensor | None, None]:
        return *_by_derivatives(
            ctx, grad, partial(student_t_integrals.excess_integrals, df=ctx.df)
        ), None
