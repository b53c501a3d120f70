"""Pure tensor maths: KL terms, and functions that stay accurate for tiny and huge numbers."""

from zeromean.functional.dirichlet import dirichlet_entropies, dirichlet_nll
from zeromean.functional.gamma import gamma_kl, gamma_quantile
from zeromean.functional.kl import (
    HALF_LOG_MOMENT,
    ard_kl,
    binary_dropout_kl,
    log_uniform_kl,
    log_uniform_kl_approx,
    log_uniform_kl_sample,
    log_uniform_kl_sum,
    normal_kl,
    normal_to_normal_kl,
)
from zeromean.functional.numerics import (
    can_branch,
    dawson,
    log_mean_exp,
    safe_sqrt,
    smallest_normal,
    wide,
)
from zeromean.functional.random_logits import (
    SoftmaxMoments,
    expected_sigmoid,
    expected_softmax,
)
from zeromean.functional.student_t import student_t_kl, student_t_kl_sample

__all__ = [
    "HALF_LOG_MOMENT",
    "SoftmaxMoments",
    "ard_kl",
    "binary_dropout_kl",
    "can_branch",
    "dawson",
    "dirichlet_entropies",
    "dirichlet_nll",
    "expected_sigmoid",
    "expected_softmax",
    "gamma_kl",
    "gamma_quantile",
    "log_mean_exp",
    "log_uniform_kl",
    "log_uniform_kl_approx",
    "log_uniform_kl_sample",
    "log_uniform_kl_sum",
    "normal_kl",
    "normal_to_normal_kl",
    "safe_sqrt",
    "smallest_normal",
    "student_t_kl",
    "student_t_kl_sample",
    "wide",
]
