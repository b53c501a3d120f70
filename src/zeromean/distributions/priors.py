"""What p(W) is, and the Kullback–Leibler divergence from a posterior to it.

Priors are frozen values. Each gives `kl(posterior)`, the divergence summed over the weights, for
normal noise: in closed form or by a smooth quadrature where there is one, else from one sample.

The log-uniform prior is improper, so its KL is defined up to a constant; here it is 0 for a
zero-mean posterior. ELBOs compare models under one prior, never across priors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from zeromean import functional
from zeromean.arguments import require_choice, require_numbers, shown
from zeromean.distributions.hyperprior import InverseGamma, sum_by_share
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.factorized import FactorizedPosterior, independent
from zeromean.distributions.posteriors.multiplicative import Multiplicative
from zeromean.distributions.posteriors.posterior import SHARES, Posterior
from zeromean.distributions.posteriors.spread import Spread
from zeromean.functional.kl import normal_kl_sum
from zeromean.functional.numerics import wide
from zeromean.registry import register


@runtime_checkable
class Prior(Protocol):
    """Anything with `kl(posterior)`."""

    def kl(self, posterior: Posterior) -> Tensor:
        """KL(posterior ‖ prior), summed over the weights."""
        ...


@register("prior")
@dataclass(frozen=True, init=False)
class LogUniform:
    """p(w) ∝ 1/|w|, the prior of variational dropout.

    Args:
        kl: "exact" (through Dawson's function, Hron et al. 2017), "approx" (the sigmoid fit of
            Molchanov et al. 2017, off by up to 0.0094 nat a weight) or "sample" (one draw).
    """

    method: str

    def __init__(self, kl: Literal["exact", "approx", "sample"] = "exact"):
        require_choice("kl", kl, ("exact", "approx", "sample"))
        object.__setattr__(self, "method", kl)

    def kl(self, posterior: Posterior) -> Tensor:
        posterior = independent(posterior, "LogUniform")
        if not posterior.has_mean:
            return _zero(posterior)
        if self.method == "sample":
            return _log_uniform_sample(posterior)
        if self.method == "approx":
            return _sum_over_alpha(functional.log_uniform_kl_approx, posterior)
        if isinstance(posterior, Additive):
            return functional.log_uniform_kl_sum(
                _of_random(posterior, posterior.masked(posterior.mean)),
                _of_random(posterior, posterior.log_variance),
            )
        return _sum_over_alpha(_exact_log_uniform_kl, posterior)

    def settings(self) -> dict[str, str]:
        return {"kl": self.method}

    def __repr__(self) -> str:
        return f"LogUniform(kl={self.method!r})"


@register("prior")
@dataclass(frozen=True, init=False)
class StudentT:
    """Student's t with `df` degrees of freedom: a proper prior that tends to LogUniform.

    The constant is fixed so that df → 0 gives LogUniform's KL; a normalised density would add
    −log df − 1.36 there, about 35 nat a weight at the default. Neklyudov et al. (2019),
    equation 10.

    Args:
        df: Degrees of freedom.
        kl: "quadrature" (smooth, deterministic) or "sample" (one draw, as the paper did; its
            gradient is very noisy where α is large).
    """

    df: float
    method: str

    def __init__(self, df: float = 1e-16, kl: Literal["quadrature", "sample"] = "quadrature"):
        require_numbers(df=df)
        require_choice("kl", kl, ("quadrature", "sample"))
        if not 0 < df < math.inf:
            raise ValueError(f"StudentT needs df > 0, got {df}; for the limit 0 use LogUniform().")
        object.__setattr__(self, "df", float(df))
        object.__setattr__(self, "method", kl)

    def kl(self, posterior: Posterior) -> Tensor:
        posterior = independent(posterior, "StudentT")
        if self.method == "sample":
            mean, scale, log_variance = _moments(posterior)
            noise = posterior.noise(scale)
            kl = functional.student_t_kl_sample(mean, log_variance, self.df, noise)
            return sum_of(posterior, kl)
        mean, _, log_variance = _moments(posterior)
        return sum_of(posterior, functional.student_t_kl(mean, log_variance, self.df))

    def settings(self) -> dict[str, float | str]:
        return {"df": self.df, "kl": self.method}

    def __repr__(self) -> str:
        return f"StudentT(df={self.df:g}, kl={self.method!r})"


@register("prior")
@dataclass(frozen=True)
class ARD:
    """Automatic relevance determination: N(0, λ²) with a λ for every weight, at its optimum.

    The best λ² is mean² + variance, which leaves KL = ½ log(1 + 1/α). (The paper's equation 11
    lacks the ½.)
    """

    def kl(self, posterior: Posterior) -> Tensor:
        posterior = independent(posterior, "ARD")
        if not posterior.has_mean:
            return _zero(posterior)
        return _sum_over_alpha(functional.ard_kl, posterior)


@register("prior")
@dataclass(frozen=True)
class Normal:
    """N(0, scale²).

    Args:
        scale: Standard deviation.
        learn: Empirical Bayes: the best scale² in place of `scale`, in closed form: the average of
            mean² + variance over the weights that share it.
        per: What shares a learned scale: "layer", "neuron" (as in `zm.Multiplicative`) or "weight".
            As many scales as weights overfit; they want a hyperprior.
        hyperprior: What is known of a learned scale² beforehand, such as `zm.InverseGamma(2, 0.1)`.
            The scale is the most probable one, and the KL term has −log of the density there, by
            which it may be negative.
    """

    scale: float = 1.0
    learn: bool = False
    per: Literal["layer", "neuron", "weight"] = "layer"
    hyperprior: InverseGamma | None = None

    def __post_init__(self):
        require_numbers(scale=self.scale)
        if not 0 < self.scale < math.inf:
            raise ValueError(f"Normal needs a scale > 0, got {self.scale}.")
        require_choice("per", self.per, SHARES)
        if isinstance(self.hyperprior, Mapping):  # As files have it.
            object.__setattr__(self, "hyperprior", InverseGamma(**self.hyperprior))
        if not isinstance(self.hyperprior, InverseGamma | None):
            raise TypeError(
                f"hyperprior must be a zm.InverseGamma or None, got {shown(self.hyperprior)}."
            )
        if not self.learn and (self.per != "layer" or self.hyperprior is not None):
            raise ValueError(
                "per= and hyperprior= are about scales that are learned; say learn=True."
            )

    def settings(self) -> dict[str, Any]:
        """Its arguments; what came later only where it is set, so that files stay as they were."""
        settings: dict[str, Any] = {"scale": self.scale, "learn": self.learn}
        if self.per != "layer":
            settings["per"] = self.per
        if self.hyperprior is not None:
            settings["hyperprior"] = asdict(self.hyperprior)
        return settings

    def __repr__(self) -> str:
        shown_fields = {**self.settings(), "hyperprior": self.hyperprior}
        if self.hyperprior is None:
            del shown_fields["hyperprior"]
        return f"Normal({', '.join(f'{name}={value!r}' for name, value in shown_fields.items())})"

    def learned_variance(self, posterior: Posterior) -> Tensor:
        """The best scale² for a posterior: one number, or one for each neuron or weight."""
        if not self.learn:
            raise ValueError(f"The scale of {self} is not learned; it is {self.scale:g}.")
        squares, count, _ = self._sums(posterior)
        return self._best(squares, count)

    def kl(self, posterior: Posterior) -> Tensor:
        if self.learn and self.per == "weight" and self.hyperprior is None:
            return ARD().kl(posterior)
        if self.learn and (self.per != "layer" or self.hyperprior is not None):
            return self._learned_kl(posterior)
        if not isinstance(posterior, FactorizedPosterior):
            return self._joint_kl(posterior)
        mean, spread, kind = posterior.mean_and_spread()
        if mean is not None and kind is Spread.LOG_VARIANCE and posterior.mask is None:
            scale = None if self.learn else self.scale
            return normal_kl_sum(wide(mean), wide(spread), scale)
        mean, deviation, log_variance = _moments(posterior)
        scale = torch.as_tensor(self.scale, dtype=deviation.dtype, device=deviation.device)
        if self.learn:
            second_moment = deviation.square()
            if mean is not None:
                second_moment = second_moment + mean.square()
            average = sum_of(posterior, second_moment) / num_random(posterior)
            scale = average.clamp_min(torch.finfo(scale.dtype).tiny).sqrt()
        return sum_of(posterior, functional.normal_kl(mean, log_variance, scale))

    def _learned_kl(self, posterior: Posterior) -> Tensor:
        """By sums over the weights that share a scale; −log of the hyperprior is a part of it."""
        squares, count, log_determinant = self._sums(posterior)
        variance = self._best(squares, count)
        kl = 0.5 * (squares / variance - count + count * variance.log())
        if self.hyperprior is not None:
            kl = kl - self.hyperprior.log_density(variance)
        # Where all weights have been pruned there is no scale.
        return torch.where(count > 0, kl, 0.0).sum() - 0.5 * log_determinant

    def _best(self, squares: Tensor, count: Tensor) -> Tensor:
        if self.hyperprior is None:
            return (squares / count.clamp_min(1)).clamp_min(torch.finfo(squares.dtype).tiny)
        return self.hyperprior.best_variance(squares, count)

    def _sums(self, posterior: Posterior) -> tuple[Tensor, Tensor, Tensor]:
        """Σ mean² + variance and the number of weights by scale, and log det of the covariance."""
        if self.per != "layer":
            posterior = independent(posterior, f"Normal(learn=True, per={self.per!r})")
        mean, variance = posterior.moments()
        squares = wide(variance if mean is None else variance + mean.square())
        ones = torch.ones_like(squares)
        sums = [
            sum_by_share(posterior.counted(posterior.masked(each)), self.per, posterior.layout)
            for each in (squares, ones)
        ]
        return sums[0], sums[1], wide(posterior.log_determinant())

    def _joint_kl(self, posterior: Posterior) -> Tensor:
        """The KL of all weights together, which needs their sizes and the determinant alone."""
        mean, variance = posterior.moments()
        squares = variance if mean is None else variance + mean.square()
        second_moment, count = sum_of(posterior, wide(squares)), num_random(posterior)
        prior_variance = torch.as_tensor(self.scale**2).to(second_moment)
        if self.learn:
            smallest = torch.finfo(second_moment.dtype).tiny
            prior_variance = (second_moment / count).clamp_min(smallest)
        relative = second_moment / prior_variance - count
        return 0.5 * (relative + count * prior_variance.log() - wide(posterior.log_determinant()))


def _exact_log_uniform_kl(log_alpha: Tensor) -> Tensor:
    return functional.log_uniform_kl((-log_alpha).exp())


def _sum_over_alpha(kl: Callable[[Tensor], Tensor], posterior: FactorizedPosterior) -> Tensor:
    """Sum over the weights of a KL that depends on α alone: one evaluation for every α.

    It is zero at α = ∞, which is where pruned weights stand.
    """
    if isinstance(posterior, Multiplicative) and posterior.share != "weight":
        if posterior.mask is None:
            return kl(wide(posterior.log_alpha)).sum() * posterior.weights_per_alpha
    return kl(_of_random(posterior, posterior.log_alpha_per_weight())).sum()


def _log_uniform_sample(posterior: FactorizedPosterior) -> Tensor:
    mean, scale, log_variance = _moments(posterior)
    if isinstance(posterior, Multiplicative):
        # Only α counts, which here is a parameter: no 0 / 0 where a mean is zero.
        mean = torch.ones_like(scale)
        log_variance = wide(posterior.masked(posterior.log_alpha_per_weight()))
    noise = posterior.noise(scale)
    return sum_of(posterior, functional.log_uniform_kl_sample(mean, log_variance, noise))


def _moments(posterior: FactorizedPosterior) -> tuple[Tensor | None, Tensor, Tensor]:
    """Mean (None: zero), signed standard deviation and log-variance of every weight.

    All are finite: pruned weights, which `_total` leaves out, have log-variance 0.
    """
    mean, scale = posterior.mean_and_scale()
    log_variance = posterior.masked(posterior.log_variance_per_weight())
    return None if mean is None else wide(mean), wide(scale), wide(log_variance)


def sum_of(posterior: Posterior, per_weight: Tensor) -> Tensor:
    """Sum over the weights that are random: not pruned, not in the noiseless row."""
    return posterior.counted(posterior.masked(per_weight)).sum()


def num_random(posterior: Posterior) -> int | Tensor:
    if posterior.mask is None:
        return posterior.num_random
    return posterior.counted(posterior.mask).sum().clamp_min(1)


def _of_random(posterior: Posterior, per_weight: Tensor) -> Tensor:
    return wide(posterior.counted(per_weight))


def _zero(posterior: Posterior) -> Tensor:
    return wide(torch.zeros((), dtype=posterior.dtype, device=posterior.device))
