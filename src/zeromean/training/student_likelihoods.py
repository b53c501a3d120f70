"""What a student is trained by: labels, or the samples of a teacher.

A target is a label, or holds a dimension more, `(examples, samples, …)`: then it is what the
networks of a teacher said of each example, their logits, or their means and log-variances. Each
likelihood is the expected log-likelihood under these, and its optimum is their average, or their
distribution.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.arguments import require_choice, require_numbers
from zeromean.functional.dirichlet import dirichlet_entropies, dirichlet_nll
from zeromean.prediction.classification import PredictiveUncertainty
from zeromean.prediction.probabilities import require_logits
from zeromean.prediction.regression import PredictiveMoments
from zeromean.training.likelihoods import (
    HeteroscedasticGaussianLikelihood,
    require_classes_of,
)

_LOG_TWO_PI = math.log(2 * math.pi)
# In nats. Samples that agree would make concentrations grow without end.
_LEAST_INFORMATION = 1e-6


class CategoricalLikelihood(nn.Module):
    """Classes by logits; of a teacher's samples, the cross-entropy to their averaged probabilities.

    Balan et al. (2015), "Bayesian dark knowledge".
    """

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Of the classes, along dimension 1."""
        return outputs.softmax(1)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, averaged over the examples."""
        if not _is_sampled(outputs, targets):
            return _label_loss(outputs, targets)
        _require_shape(outputs, targets, outputs.shape[1:])
        require_logits(self, outputs)
        return F.cross_entropy(outputs, targets.softmax(2).mean(1).to(outputs.dtype))


class DirichletLikelihood(nn.Module):
    """Probabilities that are random themselves: Dirichlet with concentrations e^output.

    The mean is the softmax of the outputs, so that `zm.predict_proba` and losses for logits read
    them as ever; their common part says how much a teacher's samples disagree. Malinin and Gales
    (2018), "Predictive uncertainty estimation via prior networks"; Malinin, Mlodozeniec and Gales
    (2020), "Ensemble distribution distillation".

    Args:
        match: What a fit to samples is about. "entropies": the averaged probabilities, and the
            mutual information, to which the common part of the outputs is fitted alone; students
            predict as well as those of the average. "likelihood": the density of the samples, as
            the papers have it. It is about the logarithms of the smallest probabilities, and
            where samples are surer than a Dirichlet can be predictions pay for that.
        smoothing: Of "likelihood", part of each sample's probabilities that goes to all classes
            alike, so that none is 1e-20.
    """

    def __init__(
        self,
        match: Literal["entropies", "likelihood"] = "entropies",
        *,
        smoothing: float = 1e-4,
    ):
        super().__init__()
        require_choice("match", match, ("entropies", "likelihood"))
        require_numbers(smoothing=smoothing)
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), got {smoothing}.")
        self.match = match
        self.smoothing = float(smoothing)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Expected ones of the classes, along dimension 1."""
        return outputs.softmax(1)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy to labels, or what is least where the samples are matched."""
        if not _is_sampled(outputs, targets):
            return _label_loss(outputs, targets)
        _require_shape(outputs, targets, outputs.shape[1:])
        require_logits(self, outputs)
        log_probability = targets.to(outputs.dtype).log_softmax(2)
        if self.match == "entropies":
            return _entropy_loss(outputs, log_probability)
        if self.smoothing > 0:
            uniform = math.log(self.smoothing / targets.shape[2])
            kept = log_probability + math.log1p(-self.smoothing)
            log_probability = torch.logaddexp(kept, torch.full_like(kept, uniform))
        return dirichlet_nll(outputs, log_probability.mean(1), dim=1).mean()

    @torch.no_grad()
    def predictive_uncertainty(self, outputs: Tensor) -> PredictiveUncertainty:
        """Entropies and mutual information in closed form, from one pass of the student."""
        expected, information = dirichlet_entropies(outputs, dim=1)
        return PredictiveUncertainty(expected + information, expected, information)

    def extra_repr(self) -> str:
        return f"{self.match!r}, smoothing={self.smoothing:g}"


class TotalVarianceLikelihood(nn.Module):
    """A regression by means and log-variances; of a teacher's samples, those of their mixture.

    The variance is that of the noise and of the teacher's doubts together.
    """

    def mean_and_log_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the targets."""
        return HeteroscedasticGaussianLikelihood().mean_and_log_variance(outputs)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, summed over the outputs, averaged over the examples."""
        if not _is_sampled(outputs, targets):
            return HeteroscedasticGaussianLikelihood().nll(outputs, targets)
        mean, log_variance = self.mean_and_log_variance(outputs)
        means, noises = _of_teacher(outputs, targets, mean)
        squares = ((means - mean.unsqueeze(1)).square() + noises.exp()).mean(1)
        return _normal_nll(squares, log_variance)

    @torch.no_grad()
    def predictive_moments(self, outputs: Tensor) -> PredictiveMoments:
        """Mean and variance, all of which counts as noise here."""
        mean, log_variance = self.mean_and_log_variance(outputs)
        return PredictiveMoments(mean, log_variance.exp(), torch.zeros_like(mean))


class SplitVarianceLikelihood(nn.Module):
    """A regression whose outputs are means and two log-variances: of the noise, and of the mean.

    The last dimension holds as many of each, one after the other. Of a teacher's samples the second
    variance is that of the means over the networks, the first the average of their noise.
    """

    def mean_and_log_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the targets, which both variances add to."""
        mean, aleatoric, epistemic = self._parts(outputs)
        return mean, torch.logaddexp(aleatoric, epistemic)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood, summed over the outputs, averaged over the examples."""
        mean, aleatoric, epistemic = self._parts(outputs)
        if not _is_sampled(outputs, targets):
            total = torch.cat(self.mean_and_log_variance(outputs), -1)
            return HeteroscedasticGaussianLikelihood().nll(total, targets)
        means, noises = _of_teacher(outputs, targets, mean)
        spread = (means - mean.unsqueeze(1)).square().mean(1)
        return _normal_nll(spread, epistemic) + _normal_nll(noises.exp().mean(1), aleatoric)

    @torch.no_grad()
    def predictive_moments(self, outputs: Tensor) -> PredictiveMoments:
        """Mean, aleatoric and epistemic variance, from one pass of the student."""
        mean, aleatoric, epistemic = self._parts(outputs)
        return PredictiveMoments(mean, aleatoric.exp(), epistemic.exp())

    @torch.no_grad()
    def predictive_uncertainty(self, outputs: Tensor) -> PredictiveUncertainty:
        """Differential entropies of the targets and mutual information, summed over outputs."""
        _, aleatoric, epistemic = self._parts(outputs)
        constant = _LOG_TWO_PI + 1
        total = 0.5 * (constant + torch.logaddexp(aleatoric, epistemic)).sum(-1)
        expected = 0.5 * (constant + aleatoric).sum(-1)
        information = 0.5 * F.softplus(epistemic - aleatoric).sum(-1)
        return PredictiveUncertainty(total, expected, information)

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if outputs.dim() < 2 or outputs.shape[-1] % 3:
            raise ValueError(
                "The student must return means, log-variances of the noise and log-variances of "
                "the mean, three numbers for each output in the last dimension, got outputs of "
                f"shape {tuple(outputs.shape)}."
            )
        mean, aleatoric, epistemic = outputs.chunk(3, -1)
        return mean, aleatoric, epistemic


def _label_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    require_classes_of(outputs, labels)
    require_logits(nn.Identity(), outputs)
    return F.cross_entropy(outputs, labels)


def _is_sampled(outputs: Tensor, targets: Tensor) -> bool:
    return targets.dim() == outputs.dim() + 1


def _require_shape(outputs: Tensor, targets: Tensor, wanted: torch.Size) -> None:
    found = targets.shape[2:]
    if found != wanted or len(outputs) != len(targets):
        raise ValueError(
            "The student must return as much for an example as the teacher, which returns "
            f"{tuple(found)}; got {tuple(wanted)}."
        )


def _entropy_loss(outputs: Tensor, log_probability: Tensor) -> Tensor:
    """Least where the mean is the averaged probability, and the information that of the samples.

    The information is E KL(p ‖ mean), of which each sample has its share, without a bias from how
    few there are. It is fitted as the mean of an exponential distribution is.
    """
    probability = log_probability.exp()
    mean = outputs.log_softmax(1)
    cross_entropy = -(probability.mean(1) * mean).sum(1).mean()
    mean = mean.detach()
    shares = (probability * (log_probability - mean.unsqueeze(1))).sum(2).mean(1)
    # Only a shift of all outputs alike is fitted by this: it leaves the mean as it is.
    shift = outputs.mean(1, keepdim=True)
    _, information = dirichlet_entropies(outputs.detach() + shift - shift.detach(), dim=1)
    information = information.clamp_min(_LEAST_INFORMATION)
    fitted = shares.clamp_min(_LEAST_INFORMATION) / information + information.log()
    return cross_entropy + fitted.mean()


def _of_teacher(outputs: Tensor, targets: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Means and log-variances of the samples, `(examples, samples, outputs)`."""
    _require_shape(outputs, targets, torch.Size((*mean.shape[1:-1], 2 * mean.shape[-1])))
    means, noises = targets.to(outputs.dtype).chunk(2, -1)
    return means, noises


def _normal_nll(squares: Tensor, log_variance: Tensor) -> Tensor:
    """Of numbers with an expected squared distance from the mean."""
    terms = squares * (-log_variance).exp() + log_variance + _LOG_TWO_PI
    return 0.5 * terms.sum(-1).mean()
