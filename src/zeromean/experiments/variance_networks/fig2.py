"""Figure 2: the KL divergence against α for the three priors.

Log-uniform exactly and by the sigmoid fit, Student's t for several degrees of freedom (which needs
a mean, too), and ARD with the ½ that equation 11 of the paper lacks, and without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeromean import functional
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.figure import figure, trace
from zeromean.experiments.runs.log import RunLog

TITLE = "Figure 2: the KL divergence against α, for every prior"
SOURCE = "Neklyudov et al. (2019), Figure 2 and equations 6 to 11"
NEEDS: tuple[str, ...] = ()
COVERS = (
    "paper: Figure 2",
    "paper: equation 11",
    "chirkova: approximating the KL divergence",
    "molchanov: why large alphas",
)
VERSION = 2  # Student's t by quadrature down to the smallest degrees of freedom.
DETERMINISTIC = True


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is drawn."""

    log_alpha: tuple[float, float] = (-8.0, 12.0)
    """Range of log α."""
    points: int = 401
    """Values of log α in it."""
    df: tuple[float, ...] = (1e-16, 1e-4, 1e-2, 1.0)
    """Degrees of freedom of Student's t."""
    mean: float = 1.0
    """Mean of the weight, on which only the KL to Student's t depends."""
    seed: int = 0
    """Nothing here is random."""


QUICK = Config()
SMOKE = Config(points=41)
CLAIMS = [
    Claim(
        "max_difference.student_t_1e-16",
        0.0,
        PAPER("Figure 2, “indistinguishable”"),
        1e-3,
        label="Student's t with ν = 10⁻¹⁶ is indistinguishable from the log-uniform prior",
        unit="nat",
    ),
    Claim(
        "decreasing",
        1.0,
        PAPER("section 4.3"),
        label="the KL falls with α for the log-uniform, the Student-t (ν → 0) and the ARD prior",
    ),
    Claim(
        "max_difference.approximation",
        0.0094,
        ours("our own measurement; the paper says “accurately approximated”"),
        5e-4,
        "at most",
        label="largest error of the sigmoid fit",
        unit="nat",
    ),
    Claim(
        "value_at_zero.ard",
        0.6931,
        PAPER("equation (11)"),
        1e-3,
        label="the ARD term at α = 1 (½ log 2 by derivation: the equation lacks a ½)",
        unit="nat",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    low, high = config.log_alpha
    log_alpha = torch.linspace(low, high, config.points, dtype=torch.float64)
    exact = functional.log_uniform_kl((-log_alpha).exp())
    mean = torch.full_like(log_alpha, config.mean)
    log_variance = log_alpha + 2 * mean.abs().log()
    curves = {
        "log_uniform": exact,
        "log_uniform_approx": functional.log_uniform_kl_approx(log_alpha),
        **{
            f"student_t_{df:g}": functional.student_t_kl(mean, log_variance, df) for df in config.df
        },
        "ard": functional.ard_kl(log_alpha),
        "ard_as_printed": 2 * functional.ard_kl(log_alpha),
    }
    zero = torch.zeros(1, dtype=torch.float64)
    falling = ("log_uniform", f"student_t_{min(config.df):g}", "ard")
    log.metrics(**curves)
    return {
        "log_alpha": log_alpha,
        "curves": curves,
        "max_difference": {
            "approximation": (curves["log_uniform_approx"] - exact).abs().max(),
            **{
                name: (curve - exact).abs().max()
                for name, curve in curves.items()
                if name.startswith("student_t")
            },
        },
        "value_at_zero": {
            "log_uniform": functional.log_uniform_kl(zero.exp()).item(),
            "ard": functional.ard_kl(zero).item(),
        },
        "decreasing": float(all((curves[name].diff() < 0).all() for name in falling)),
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = records[0]["metrics"]
    names = {
        "log_uniform": "log-uniform, exact",
        "log_uniform_approx": "log-uniform, approximate",
        "ard": "ARD, ½ log(1 + 1/α)",
        "ard_as_printed": "ARD as printed, log(1 + 1/α)",
    }
    log_alpha, curves = metrics["log_alpha"], metrics["curves"]
    traces = [
        trace(names.get(key, f"Student-t, ν = {key.removeprefix('student_t_')}"), log_alpha, curve)
        for key, curve in curves.items()
    ]
    pairs = zip(curves["log_uniform_approx"], curves["log_uniform"], strict=True)
    error = trace("approximate − exact", log_alpha, [fit - exact for fit, exact in pairs])
    return [
        figure("KL divergence of one weight", "log α", "KL, nat", traces),
        figure("Error of the sigmoid fit", "log α", "nat a weight", [error]),
    ]
