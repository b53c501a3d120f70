"""How noisy the gradient is: three claims of the lectures, measured on a small network on digits.

1. The variance of a mini-batch gradient has two parts,
   Var[mean of g_i] = (1/M²) Σ Var[g_i] + (1/M²) Σ_{i≠j} Cov[g_i, g_j].
   Weight sampling (RT) shares one draw over the batch, so its covariance stays whatever the batch
   size M; local reparameterization (LRT) has none, and a smaller Var[g_i] of the variances as well.
2. With multiplicative noise w = μ(1 + √α ε) the gradient of μ explodes with α; with additive noise
   of the same variance it does not.
3. The one-sample KL to Student's t has a gradient in log α that is all noise where α is large; the
   quadrature has no noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromean as zm
from zeromean import functional
from zeromean.experiments.networks import small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import MOLCHANOV, ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.log import RunLog

TITLE = "Gradient variance: LRT against RT, additive against multiplicative noise, KL estimates"
SOURCE = "lectures on Bayesian networks; Neklyudov et al. (2019), Appendix B"
NEEDS: tuple[str, ...] = ("digits",)
COVERS = ("molchanov: local reparameterization", "molchanov: variance reduction")
SAMPLERS = {"rt": zm.weight, "lrt": zm.local}
PARAMETERS = {"mean": "3.weight.mean", "log_variance": "3.weight.log_variance"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """A network of three dense layers on digits, the middle one stochastic."""

    steps: int = 600
    """Training steps before anything is measured."""
    draws: int = 400
    """Draws of the noise for each variance."""
    batch_sizes: tuple[int, ...] = (1, 3, 10, 30, 100, 300)
    """Sizes of the mini-batch."""
    log_alphas: tuple[float, ...] = (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 8.0)
    """Values of log α."""
    log_variance: float = -5.0
    """Log-variance of the weights of the middle layer, for the first claim."""
    kl_draws: int = 200_000
    """Draws of the one-sample KL."""
    seed: int = 0
    """Seed of the network, the batches and the noise."""


QUICK = Config(draws=150)
SMOKE = Config(
    steps=20, draws=10, batch_sizes=(1, 10, 30), log_alphas=(-4.0, 0.0, 4.0), kl_draws=2000
)
CLAIMS = [
    Claim(
        "lrt.log_variance.covariance_share",
        0.0,
        MOLCHANOV("local reparameterization, “zero correlation”"),
        0.2,
        label="share of the covariance term in LRT’s gradient variance, largest batch",
    ),
    Claim(
        "rt.log_variance.covariance_share",
        0.8,
        ours("the lecture says “high correlation”, without a number"),
        0.0,
        "at least",
        label="share of the covariance term in RT’s gradient variance, largest batch",
    ),
    Claim(
        "rt_over_lrt.log_variance.within",
        1.0,
        MOLCHANOV("local reparameterization, “also reduces the variance”"),
        0.0,
        "at least",
        label="one object’s gradient variance, RT over LRT, for the log-variances",
    ),
    Claim(
        "rt_over_lrt.mean.within",
        1.0,
        MOLCHANOV("local reparameterization, “the same for both RT and LRT”"),
        0.25,
        label="one object’s gradient variance, RT over LRT, for the means",
    ),
    Claim(
        "multiplicative_over_additive_at_end",
        1.0,
        MOLCHANOV("variance reduction, “very noisy” against “no noise”"),
        0.0,
        "at least",
        label="variance of the means’ gradient at the highest α, multiplicative over additive",
    ),
    Claim(
        "multiplicative_over_additive_at_end",
        100.0,
        ours("two orders of magnitude"),
        0.0,
        "at least",
        label="the same ratio is large",
    ),
    Claim(
        "student_t_signal_to_noise_at_end",
        0.1,
        ours("the paper's Appendix B says “very noisy when α is large”, without a number"),
        0.0,
        "at most",
        label="one-sample Student-t KL: gradient in log α over its noise at the highest α",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    if not all(1 <= size <= 1000 for size in config.batch_sizes):
        raise ValueError(f"batch_sizes must lie between 1 and 1000, got {config.batch_sizes}.")
    batch = log.once("batch", lambda: _batch_variance(config))
    noise = log.once("noise", lambda: _noise_variance(config))
    kl = log.once("kl", lambda: _kl_variance(config))
    log.metrics(batch=batch, noise=noise, kl=kl)
    largest = batch[-1]
    ratios = {
        parameter: {
            part: largest["rt"][part][parameter] / largest["lrt"][part][parameter]
            for part in ("within", "total")
        }
        for parameter in PARAMETERS
    }
    shares = {
        sampler: {
            parameter: {
                "covariance_share": 1
                - largest[sampler]["within"][parameter] / largest[sampler]["total"][parameter]
            }
            for parameter in PARAMETERS
        }
        for sampler in SAMPLERS
    }
    return {
        "batch": batch,
        "noise": noise,
        "kl": kl,
        "rt_over_lrt": ratios,
        **shares,
        "multiplicative_over_additive_at_end": noise[-1]["multiplicative"] / noise[-1]["additive"],
        "student_t_signal_to_noise_at_end": kl[-1]["signal_to_noise"],
        "student_t_right_sign_at_end": kl[-1]["right_sign"],
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    sizes = [row["batch_size"] for row in metrics[0]["batch"]]
    drawn = []
    for parameter, name in (("mean", "means"), ("log_variance", "log-variances")):
        traces = []
        for sampler in SAMPLERS:
            for part, label in (("total", ""), ("within", ", within-object part")):
                curves = [[row[sampler][part][parameter] for row in m["batch"]] for m in metrics]
                traces.append(over_seeds(sampler.upper() + label, sizes, curves))
        drawn.append(
            figure(
                f"Gradient variance of the {name}",
                "batch size",
                "total variance",
                traces,
                x_log=True,
                y_log=True,
            )
        )
    log_alpha = [row["log_alpha"] for row in metrics[0]["noise"]]
    drawn.append(
        figure(
            "Gradient variance of the means: multiplicative against additive noise",
            "log α",
            "total variance",
            [
                over_seeds(kind, log_alpha, [[row[kind] for row in m["noise"]] for m in metrics])
                for kind in ("multiplicative", "additive", "multiplicative, LRT", "additive, LRT")
            ],
            y_log=True,
        )
    )
    names = {
        "exact": "−dKL/d log α, quadrature",
        "interquartile": "one sample: interquartile range",
        "std": "one sample: standard deviation",
    }
    drawn.append(
        figure(
            "Gradient of the Student-t KL in log α",
            "log α",
            "nat a weight",
            [
                over_seeds(label, log_alpha, [[row[key] for row in m["kl"]] for m in metrics])
                for key, label in names.items()
            ],
            y_log=True,
        )
    )
    return drawn


def _batch_variance(config: Config) -> list[dict[str, Any]]:
    """The two parts for every batch size; the batches are nested."""
    inputs, labels, _, _ = small_networks.digits()
    trained = _trained(config, inputs, labels)
    model = _with_middle_layer(trained, partial(zm.Additive, log_variance=config.log_variance))
    order = torch.randperm(len(inputs))
    inputs, labels = inputs[order], labels[order]
    # Averaged over examples, one example's variance needs fewer draws.
    draws = max(5, config.draws // 5)
    alone = {
        name: [
            gradient_variance(model, inputs[i : i + 1], labels[i : i + 1], sampler, draws)
            for i in range(max(config.batch_sizes))
        ]
        for name, sampler in SAMPLERS.items()
    }
    rows = []
    for size in config.batch_sizes:
        row: dict[str, Any] = {"batch_size": size}
        for name, sampler in SAMPLERS.items():
            row[name] = {
                "total": gradient_variance(
                    model, inputs[:size], labels[:size], sampler, config.draws
                ),
                "within": {p: sum(v[p] for v in alone[name][:size]) / size**2 for p in PARAMETERS},
            }
        rows.append(row)
    return rows


def _noise_variance(config: Config) -> list[dict[str, float]]:
    inputs, labels, _, _ = small_networks.digits()
    trained = _trained(config, inputs, labels)
    inputs, labels = inputs[:100], labels[:100]
    rows = []
    for log_alpha in config.log_alphas:
        multiplicative = _with_middle_layer(
            trained, partial(zm.Multiplicative, share="weight", log_alpha=log_alpha)
        )
        additive = _with_middle_layer(trained, zm.Additive)
        with torch.no_grad():
            middle = multiplicative.get_submodule("3.weight")
            assert isinstance(middle, zm.FactorizedPosterior)
            additive.get_parameter("3.weight.log_variance").copy_(middle.log_variance_per_weight())
        row = {"log_alpha": log_alpha}
        for name, model in (("multiplicative", multiplicative), ("additive", additive)):
            for suffix, sampler in (("", zm.weight), (", LRT", zm.local)):
                variance = gradient_variance(model, inputs, labels, sampler, config.draws)
                row[name + suffix] = variance["mean"]
        rows.append(row)
    return rows


def _kl_variance(config: Config) -> list[dict[str, float]]:
    """The gradient in log α of the KL of one weight with mean 1 to Student's t, ν = 1e-16."""
    rows = []
    for value in config.log_alphas:
        noise = torch.randn(config.kl_draws, dtype=torch.float64)
        one = torch.ones((), dtype=torch.float64)
        sampled = _slope(
            partial(functional.student_t_kl_sample, one, df=1e-16, noise=noise),
            torch.full_like(noise, value),
        )
        exact = _slope(
            lambda log_alpha: functional.student_t_kl(torch.ones_like(log_alpha), log_alpha, 1e-16),
            torch.full((1,), value, dtype=torch.float64),
        ).item()
        low, high = sampled.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
        rows.append(
            {
                "log_alpha": value,
                "exact": -exact,
                "sample_mean": -sampled.mean().item(),
                "std": sampled.std().item(),
                "interquartile": high - low,
                # Not over the standard deviation: the tails are so heavy that it does not settle.
                "signal_to_noise": abs(exact) / (high - low),
                "right_sign": ((sampled < 0) == (exact < 0)).double().mean().item(),
            }
        )
    return rows


def _slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.requires_grad_()
    return torch.autograd.grad(function(at).sum(), at)[0]


def gradient_variance(
    model: nn.Module, inputs: Tensor, labels: Tensor, sampler: Any, draws: int
) -> dict[str, float]:
    """Variance over the noise of the middle layer's gradients, summed over their entries."""
    parameters = {
        name: parameter
        for name, path in PARAMETERS.items()
        if (parameter := dict(model.named_parameters()).get(path)) is not None
    }
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    squares = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    with zm.sampling(model, sampler):
        for _ in range(draws):
            loss = F.cross_entropy(model(inputs), labels)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            for name, gradient in zip(parameters, gradients, strict=True):
                sums[name] += gradient
                squares[name] += gradient.double().square()
    return {
        name: ((squares[name] - sums[name].square() / draws).sum() / (draws - 1)).item()
        for name in parameters
    }


def _trained(config: Config, inputs: Tensor, labels: Tensor) -> nn.Sequential:
    """A network with ordinary weights, which the stochastic ones take over as their means."""
    model = small_networks.digits_network(nn.Linear)
    small_networks.train(model, inputs, labels, steps=config.steps, batch_size=100, lr=1e-3)
    return model


def _with_middle_layer(model: nn.Sequential, posterior: Callable[..., zm.Posterior]) -> nn.Module:
    stochastic = small_networks.digits_network(partial(zm.Linear, posterior=posterior, prior=None))
    state = {
        "3.weight.mean" if key == "3.weight" else key: value
        for key, value in model.state_dict().items()
    }
    stochastic.load_state_dict(state, strict=False)
    # The batch's own statistics would tie its examples together: use the running ones.
    return stochastic.eval()
