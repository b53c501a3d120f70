"""What is predicted, classes or numbers: how well, how surely, and how to make it surer or less."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeromean.prediction.ensemble import Ensemble
from zeromean.prediction.samples import sample_outputs
from zeromean.samplers.weights import mean as by_mean
from zeromean.training.likelihoods import (
    HeteroscedasticGaussianLikelihood,
    Likelihood,
    require_classes_of,
)
from zeromean.training.post_hoc.calibrated import Tempered, WithVariance, smallest
from zeromean.training.post_hoc.examples import Examples
from zeromean.uncertainty import calibration_error

# Examples that are predicted at once.
AT_ONCE = 500
# Factors of a spread are looked for between these.
_SCALES = (math.log(0.05), math.log(20.0))
# Of the central intervals whose coverage is counted.
COVERAGE = 0.9


def samples_of(model: nn.Module, inputs: Any, num_samples: int | None, seed: int) -> Tensor:
    """Outputs `(num_samples, examples, ...)`; None for the one network of the means."""
    sampler = by_mean if num_samples is None else None
    return sample_outputs(
        model, inputs, num_samples or 1, sampler=sampler, seed=seed, batch_size=AT_ONCE
    )


class Task(Protocol):
    """Classes or numbers; `samples` are outputs `(num_samples, examples, ...)`."""

    @property
    def likelihood(self) -> Likelihood | None: ...

    def wrapped(self, model: nn.Module, scale: float) -> nn.Module:
        """A model whose predictions are less sure by this factor."""
        ...

    def nll(self, samples: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Negative log-likelihood of every example, averaged over the samples inside."""
        ...

    def unsureness(self, samples: Tensor) -> Tensor:
        """A number for each example, larger where the prediction is less sure."""
        ...

    def mistakes(self, samples: Tensor, targets: Tensor) -> Tensor:
        """What each example adds to the error of the predictions, their spread left aside."""
        ...

    def measures(self, samples: Tensor, targets: Tensor) -> dict[str, float]:
        """What the table says, by its name in it, without the likelihoods."""
        ...


def wrapped(task: Task, source: nn.Module, scale: float) -> nn.Module:
    """A network, or each of several, whose predictions are less sure by this factor."""
    if isinstance(source, Ensemble):
        return Ensemble([task.wrapped(member, scale) for member in source])
    return task.wrapped(source, scale)


def fitted_scale(task: Task, samples: Tensor, targets: Tensor) -> float:
    """The factor of the spread with which examples are most likely."""

    def loss(log_scale: float) -> float:
        return task.nll(samples, targets, math.exp(log_scale)).mean().item()

    return math.exp(smallest(loss, *_SCALES))


def calibrated_nll(task: Task, samples: Tensor, targets: Tensor, seed: int) -> float:
    """Fitted on one random half of the examples and used on the other, both ways."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    halves = order.tensor_split(2)
    total = 0.0
    for fit, test in (halves, halves[::-1]):
        scale = fitted_scale(task, samples[:, fit], targets[fit])
        total += task.nll(samples[:, test], targets[test], scale).sum().item()
    return total / len(targets)


@dataclass(frozen=True)
class Classes:
    """Outputs are logits, their spread is divided by a temperature."""

    @property
    def likelihood(self) -> Likelihood | None:
        return None

    def wrapped(self, model: nn.Module, scale: float) -> nn.Module:
        return Tempered(model, scale)

    def nll(self, samples: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        logs = (samples.float() / scale).log_softmax(-1)
        of_label = logs.gather(-1, targets.expand(len(samples), -1).unsqueeze(-1)).squeeze(-1)
        return math.log(len(samples)) - of_label.logsumexp(0)

    def unsureness(self, samples: Tensor) -> Tensor:
        average = samples.float().softmax(-1).mean(0)
        return -torch.xlogy(average, average).sum(-1)

    def mistakes(self, samples: Tensor, targets: Tensor) -> Tensor:
        return (samples.float().softmax(-1).mean(0).argmax(-1) != targets).double()

    def measures(self, samples: Tensor, targets: Tensor) -> dict[str, float]:
        average = samples.float().softmax(-1).mean(0)
        wrong = self.mistakes(samples, targets).mean().item()
        return {"accuracy, %": 100 * (1 - wrong), "ECE": calibration_error(average, targets)}


@dataclass(frozen=True)
class Numbers:
    """Outputs are means and log-variances; the spread is the standard deviation of the noise."""

    num_outputs: int

    @property
    def likelihood(self) -> Likelihood | None:
        return HeteroscedasticGaussianLikelihood()

    def wrapped(self, model: nn.Module, scale: float) -> nn.Module:
        if isinstance(model, WithVariance):
            return WithVariance(
                model.model, self.num_outputs, model.log_variance + 2 * math.log(scale)
            )
        return WithVariance(model, self.num_outputs, 2 * math.log(scale))

    def nll(self, samples: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        mean, deviation = _normal(samples, scale)
        density = torch.distributions.Normal(mean, deviation).log_prob(targets.double()).sum(-1)
        return math.log(len(samples)) - density.logsumexp(0)

    def unsureness(self, samples: Tensor) -> Tensor:
        mean, deviation = _normal(samples)
        return (deviation.square().mean(0) + mean.var(0, correction=0)).sum(-1)

    def mistakes(self, samples: Tensor, targets: Tensor) -> Tensor:
        mean, _ = _normal(samples)
        return (mean.mean(0) - targets).square().sum(-1)

    def measures(self, samples: Tensor, targets: Tensor) -> dict[str, float]:
        mean, deviation = _normal(samples)
        # Where a target lies in its predictive distribution, a mixture of normals.
        place = torch.special.ndtr((targets - mean) / deviation).mean(0)
        inside = (place - 0.5).abs() <= COVERAGE / 2
        return {
            "RMSE": (mean.mean(0) - targets).square().mean().sqrt().item(),
            f"in {COVERAGE:.0%} intervals, %": 100 * inside.double().mean().item(),
        }


def task_for(model: nn.Module, examples: Examples, likelihood: Likelihood | None) -> Task:
    """Classes for targets of whole numbers, else numbers."""
    few = examples.first(2)
    outputs = samples_of(model, few.inputs, None, 0)[0]
    if not examples.targets.is_floating_point():
        if likelihood is not None:
            raise TypeError(
                "likelihood= is for a regression, whose targets are floating-point numbers, got "
                f"targets of {examples.targets.dtype}."
            )
        if outputs.dim() != 2 or outputs.shape[1] < 2:
            raise ValueError(
                "A classifier must return logits of the shape (examples, classes) for at least 2 "
                f"classes, got {tuple(outputs.shape)} for 2 examples."
            )
        classes = outputs.new_zeros(1, outputs.shape[1]).expand(len(examples), -1)
        require_classes_of(classes, examples.targets)
        if len(examples.targets.unique()) == 1:
            raise ValueError(
                "validation must have examples of at least two classes, got "
                f"{len(examples)} of class {int(examples.targets[0])}."
            )
        return Classes()
    targets = examples.targets
    if not targets.isfinite().all():
        raise ValueError(
            f"The targets of validation must be finite, got {int((~targets.isfinite()).sum())} "
            "NaN or infinite values."
        )
    has_variance = isinstance(likelihood, HeteroscedasticGaussianLikelihood)
    wanted = (2, outputs.shape[-1] // 2 if has_variance else outputs.shape[-1])
    if targets.dim() != 2 or targets[:2].shape != wanted or outputs.dim() != 2:
        raise ValueError(
            "A regression needs targets of the shape (examples, outputs), one for each mean that "
            f"the model returns, got targets of shape {tuple(targets.shape)} for outputs of shape "
            f"{tuple(outputs.shape)}; use targets.unsqueeze(-1)."
        )
    return Numbers(targets.shape[1])


def _normal(samples: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of the targets, in float64."""
    mean, log_variance = samples.double().chunk(2, -1)
    return mean, (log_variance / 2).exp() * scale
