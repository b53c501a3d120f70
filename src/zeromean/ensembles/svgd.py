"""Stein variational gradient descent: a few networks that are trained together, and kept apart.

Liu and Wang (2016), "Stein variational gradient descent: a general purpose Bayesian inference
algorithm". Each particle follows the gradients of those near it and is pushed away from them, so
that together they stand for the posterior, and not for its mode.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeromean.arguments import (
    require_function,
    require_integer,
    require_model,
    require_numbers,
    shown,
)
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.prediction.ensemble import Ensemble
from zeromean.prediction.inputs import logits_in
from zeromean.training.config import TrainingConfig
from zeromean.training.likelihoods import Likelihood, as_likelihood
from zeromean.training.randomness import isolated
from zeromean.training.student_likelihoods import CategoricalLikelihood

if TYPE_CHECKING:
    from zeromean.training.data_sources import Data


def fit_svgd(
    build: Callable[[], nn.Module],
    train: Data,
    config: TrainingConfig,
    *,
    folder: str | os.PathLike[str],
    num_particles: int = 12,
    prior_scale: float = 1.0,
    bandwidth: float | None = None,
    likelihood: Likelihood | Callable[[Tensor, Tensor], Tensor] | None = None,
    **options: Any,
) -> Ensemble:
    """Train networks together by SVGD, with `zeromean.training.fit`; resumes by itself.

    All of them see the same batches, in one process.

    Args:
        build: Makes an untrained network without random weights; its initial values are torch's.
        train: As `fit` takes it.
        config: Of the training. No weight decay: the prior is `prior_scale`.
        folder: Folder of this run only.
        num_particles: Networks, each of which costs as much as one alone.
        prior_scale: Standard deviation of the normal prior of every parameter.
        bandwidth: h of the kernel exp(−‖θ − θ'‖² / h). Default: the median of the squared
            distances over the logarithm of their number, at every step.
        likelihood: As of `fit`. Default: targets are classes.
        options: As `fit` takes them: validation, test, accelerator, augment, callbacks, ….
    """
    from zeromean.ensembles.svgd_callback import SteinCallback
    from zeromean.training.trainer import fit, require_lightning

    require_lightning()
    require_function("build", build, "a function without arguments that returns a network")
    if not isinstance(config, TrainingConfig):
        raise TypeError(
            f"config must be a TrainingConfig, got {shown(config)}; build one: "
            "TrainingConfig(epochs=10)."
        )
    if config.weight_decay or config.scale_decay:
        raise ValueError("The prior of SVGD is set by prior_scale=; leave weight_decay at 0.")
    num_particles = require_integer("num_particles", num_particles, at_least=1)
    with isolated(config.seed % 2**32):
        members = [build() for _ in range(num_particles)]
    _require_kernel(members, prior_scale, bandwidth)
    particles = Particles(members)
    callback = SteinCallback(particles.members, prior_scale, bandwidth)
    fit(
        particles,
        train,
        config,
        folder=Path(folder),
        likelihood=_of_each(likelihood, f"prior scale {prior_scale:g}, bandwidth {bandwidth}"),
        callbacks=[*options.pop("callbacks", ()), callback],
        **options,
    )
    particles.members.eval()
    return particles.members


@torch.no_grad()
def stein_gradients_(
    members: Sequence[nn.Module],
    *,
    num_data: int,
    prior_scale: float = 1.0,
    bandwidth: float | None = None,
) -> None:
    """Turn the gradients of several networks into steps of SVGD, in place, before the optimizer's.

        sum(F.cross_entropy(member(x), y) for member in members).backward()
        stein_gradients_(members, num_data=60_000)
        optimizer.step()

    Args:
        members: Networks of one architecture; the gradients are those of each one's loss, averaged
            over the examples of a batch, without a prior.
        num_data: Examples in the whole training set.
        prior_scale: Standard deviation of the normal prior of every parameter.
        bandwidth: As of `fit_svgd`.
    """
    members = list(members)
    num_data = require_integer("num_data", num_data, at_least=1)
    _require_kernel(members, prior_scale, bandwidth)
    parameters = [[p for p in each.parameters() if p.requires_grad] for each in members]
    positions = torch.stack([torch.cat([p.flatten() for p in row]) for row in parameters])
    gradients = [
        torch.cat([(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in row])
        for row in parameters
    ]
    scores = -num_data * torch.stack(gradients) - positions / prior_scale**2
    direction = stein_direction(positions, scores, bandwidth) / -num_data
    for row, values in zip(parameters, direction, strict=True):
        for parameter, value in zip(row, values.split([p.numel() for p in row]), strict=True):
            parameter.grad = value.view_as(parameter).clone()


def stein_direction(positions: Tensor, scores: Tensor, bandwidth: float | None = None) -> Tensor:
    """Where particles move, `(particles, dimensions)`: mean over j of k(xⱼ, xᵢ) sⱼ + ∇ⱼ k(xⱼ, xᵢ).

    Args:
        positions: x, `(particles, dimensions)`.
        scores: s, the gradients of the logarithm of the density there.
        bandwidth: h of k = exp(−‖x − x'‖² / h). Default: the median heuristic.
    """
    count = len(positions)
    if count == 1:
        return scores
    # Not by products, which lose the distances of particles that are close to each other.
    squared = torch.cdist(
        positions, positions, compute_mode="donot_use_mm_for_euclid_dist"
    ).square()
    if bandwidth is None:
        several = squared[~torch.eye(count, dtype=torch.bool, device=squared.device)]
        scale = several.median() / math.log(count)
        # Half of them may be in one place: then nothing is pushed.
        scale = scale.clamp_min(torch.finfo(scale.dtype).tiny)
    else:
        scale = torch.as_tensor(bandwidth).to(squared)
    kernel = (-squared / scale).exp()
    pushed = positions * kernel.sum(1, keepdim=True) - kernel @ positions
    return (kernel @ scores + 2 / scale * pushed) / count


class Particles(nn.Module):
    """Networks that are called together: outputs `(networks, examples, …)`."""

    def __init__(self, members: Sequence[nn.Module]):
        super().__init__()
        self.members = Ensemble(members)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([logits_in(member(*args, **kwargs)) for member in self.members])


class OfEach(nn.Module):
    """The likelihood of each network, averaged over them."""

    def __init__(self, likelihood: Likelihood, description: str):
        super().__init__()
        self.likelihood = likelihood
        self.description = description

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, averaged over networks and examples."""
        return torch.stack([self.likelihood.nll(each, targets) for each in outputs]).mean()

    def extra_repr(self) -> str:
        return self.description  # Two runs that differ in it are not the same.


class OfClassifiers(OfEach):
    """Classes, which networks predict by their average."""

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Averaged over the networks, with classes along dimension 1."""
        return outputs.softmax(2).mean(0)


class OfRegressions(OfEach):
    """Numbers with noise: what networks predict together is a mixture."""

    def mean_and_log_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Of the mixture over the networks."""
        likelihood: Any = self.likelihood
        means, noises = likelihood.mean_and_log_variance(outputs)
        variance = noises.exp().mean(0) + means.var(0, correction=0)
        return means.mean(0), variance.log()


def _of_each(likelihood: Any, description: str) -> OfEach:
    known = as_likelihood(likelihood)
    if known is None:
        return OfClassifiers(CategoricalLikelihood(), description)
    has_mean = callable(getattr(known, "mean_and_log_variance", None))
    return (OfRegressions if has_mean else OfEach)(known, description)


def _require_kernel(members: Sequence[Any], prior_scale: Any, bandwidth: Any) -> None:
    if not members:
        raise ValueError("SVGD needs at least one network, got none.")
    for index, member in enumerate(members):
        require_model(member, f"member {index}")
        if stochastic_modules(member):
            raise ValueError(
                "The particles of SVGD are networks without random weights, of which there are in "
                f"member {index}; use torch's layers."
            )
    given = {"prior_scale": prior_scale}
    if bandwidth is not None:
        given["bandwidth"] = bandwidth
    require_numbers(**given)
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value}.")
